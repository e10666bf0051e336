import signal

from threadpoolctl import threadpool_limits

threadpool_limits(1)  # the matrices here are small: a second BLAS thread only waits, and much longer on a busy machine
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it, and so would what tests start
