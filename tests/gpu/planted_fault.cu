// One fault for each tool of compute-sanitizer. A run without a report proves something only where the tool reports these
// (tools/gpu_test.py asks each for its own first): planted_fault memcheck|racecheck|initcheck|synccheck
#include <cuda_runtime.h>

#include <cstdio>
#include <cstring>

namespace {

__global__ void write_outside(int* x) { x[threadIdx.x + 1] = 1; }

__global__ void race(int* x) {
  __shared__ int sum;
  if (threadIdx.x == 0) sum = 0;
  sum += static_cast<int>(threadIdx.x);  // no barrier, no atomic
  if (threadIdx.x == 0) *x = sum;
}

__global__ void read_unwritten(int* x, const int* y) { x[threadIdx.x] = y[threadIdx.x]; }

__global__ void diverge(int* x) {
  if (threadIdx.x < 16)
    __syncthreads();  // the other half waits elsewhere
  else
    __syncwarp(0x0000FFFFu);  // by threads that are not named
  x[threadIdx.x] = 1;
}

}  // namespace

int main(int argc, char** argv) {
  const char* what = argc > 1 ? argv[1] : "";
  int *x = nullptr, *y = nullptr;
  cudaMalloc(&x, 32 * sizeof(int));
  cudaMalloc(&y, 32 * sizeof(int));
  if (!std::strcmp(what, "memcheck")) write_outside<<<1, 32>>>(x);
  if (!std::strcmp(what, "racecheck")) race<<<1, 64>>>(x);
  if (!std::strcmp(what, "initcheck")) read_unwritten<<<1, 32>>>(x, y);
  if (!std::strcmp(what, "synccheck")) diverge<<<1, 32>>>(x);
  const cudaError_t e = cudaDeviceSynchronize();
  std::printf("%s: %s\n", what, cudaGetErrorString(e));
  return 0;
}
