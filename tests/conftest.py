from threadpoolctl import threadpool_limits

threadpool_limits(1)  # the matrices here are small: a second BLAS thread only waits, and much longer on a busy machine
