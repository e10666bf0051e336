// How the device gives the host a token's experts to do and gets their sum, within one captured step: npglm/offload.py. Both sides poll
// a number in the host's memory. *ready is that of the last call of hand_over, *done that of the last one whose sum is there; numbers wrap.

// h [n], experts and weights [n_pairs] into memory of the host, then the number of this call, which `calls` counts, to *ready. One block.
KERNEL hand_over(const float* h, const int* experts, const float* weights, float* to_h, int* to_experts, float* to_weights,
                 int* calls, int* ready, int n, int n_pairs) {
  wait_for_inputs();
  for (int i = THREAD; i < n; i += N_THREADS) to_h[i] = h[i];
  for (int i = THREAD; i < n_pairs; i += N_THREADS) to_experts[i] = experts[i], to_weights[i] = weights[i];
  fence();
  barrier();
  if (THREAD) return;
  *calls = (int)((u32)*calls + 1);
  fence();
  *(volatile int*)ready = *calls;
}

// out = sum, which the host writes, once *done has come to *calls; plus `beside` if there is one. One thread per value.
KERNEL take_back_f32(const float* sum, const int* done, const int* calls, const float* beside, float* out, int n) {
  wait_for_inputs();
  if (THREAD == 0)
    while ((int)((u32)*(const volatile int*)done - (u32)*calls) < 0) {}
  fence();
  barrier();
  int i = BLOCK_X * N_THREADS + THREAD;
  if (i >= n) return;
  float x = ((const volatile float*)sum)[i];
  out[i] = beside ? x + beside[i] : x;
}
