#include <algorithm>
#include <cmath>
#include <memory>
#include <numeric>
#include <random>
#include <string>
#include <tuple>

#include "bench/gpu/gpu.hpp"
#include "cuda/launch.hpp"
#include "cuda/ptx.cuh"

namespace specstate::bench {

namespace ptx = specstate::cuda::ptx;

namespace {

constexpr int kThreads = 512;

__device__ std::uint32_t mix(std::uint32_t x) {
  x ^= x >> 16, x *= 0x7feb352du, x ^= x >> 15, x *= 0x846ca68bu;
  return x ^ (x >> 16);
}
__global__ void fill_random(std::uint32_t* words, std::int64_t n, std::uint32_t seed) {
  for (std::int64_t i = std::int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < n; i += std::int64_t{gridDim.x} * blockDim.x)
    words[i] = mix(static_cast<std::uint32_t>(i) * 2654435761u + seed);
}
__global__ void fill_floats(float* to, std::uint16_t* to16, std::int64_t n, float scale, std::uint32_t seed) {
  for (std::int64_t i = std::int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < n; i += std::int64_t{gridDim.x} * blockDim.x) {
    const float x = scale * (static_cast<float>(mix(static_cast<std::uint32_t>(i) + seed * 7919u) >> 8) * 0x1p-23f - 1.0f);
    if (to) to[i] = x;
    if (to16) to16[i] = static_cast<std::uint16_t>(__float_as_uint(x) >> 16);
  }
}

/// Reads everything with plain loads, so that it fills L2; keeps a word that is never written so that nothing is optimised away.
__global__ void __launch_bounds__(kThreads) read_all(const uint4* from, std::int64_t n, std::uint32_t* never) {
  constexpr int kFlight = 8;
  std::uint32_t seen = 0;
  const std::int64_t step = std::int64_t{gridDim.x} * kThreads * kFlight;
  for (std::int64_t i = std::int64_t{blockIdx.x} * kThreads * kFlight + threadIdx.x; i < n; i += step) {
    uint4 v[kFlight];
#pragma unroll
    for (int k = 0; k < kFlight; ++k) v[k] = i + k * kThreads < n ? __ldg(from + i + k * kThreads) : uint4{};
#pragma unroll
    for (int k = 0; k < kFlight; ++k) seen |= v[k].x ^ v[k].y ^ v[k].z ^ v[k].w;
  }
  if (seen == 0xFFFFFFFFu && never != nullptr) *never = seen;  // random bytes: practically never
}

/// Reads `in` vectors and writes `out`, spread evenly over each other. Unit of work: kFlight vectors a thread.
template <int kFlight>
__global__ void __launch_bounds__(kThreads)
    stream_kernel(const uint4* from, std::int64_t in, uint4* to, std::int64_t out, std::uint32_t* never) {
  constexpr std::int64_t kUnit = std::int64_t{kThreads} * kFlight;
  const std::int64_t units = max((in + kUnit - 1) / kUnit, (out + kUnit - 1) / kUnit), in_units = (in + kUnit - 1) / kUnit,
                     out_units = (out + kUnit - 1) / kUnit;
  std::uint32_t seen = 0;
  for (std::int64_t u = blockIdx.x; u < units; u += gridDim.x) {
    uint4 v[kFlight] = {};
    // Unit u of the longer stream goes with unit u * shorter / longer of the other.
    const std::int64_t a = u * in_units / units, a_next = (u + 1) * in_units / units;
    if (a_next > a) {
      const std::int64_t i = a * kUnit + threadIdx.x;
#pragma unroll
      for (int k = 0; k < kFlight; ++k)
        if (i + k * kThreads < in) v[k] = ptx::load_uncached(from + i + k * kThreads);
    }
    const std::int64_t b = u * out_units / units, b_next = (u + 1) * out_units / units;
    if (b_next > b) {
      const std::int64_t i = b * kUnit + threadIdx.x;
#pragma unroll
      for (int k = 0; k < kFlight; ++k)
        if (i + k * kThreads < out) to[i + k * kThreads] = uint4{v[k].x ^ 1u, v[k].y, v[k].z, v[k].w};
    } else {
#pragma unroll
      for (int k = 0; k < kFlight; ++k) seen |= v[k].x ^ v[k].y ^ v[k].z ^ v[k].w;
    }
  }
  if (seen == 0xFFFFFFFFu && never != nullptr) *never = seen;
}

__device__ __forceinline__ void load_piece(const char* p, uint4& v) { v = ptx::load_streaming(p); }
__device__ __forceinline__ void load_piece(const char* p, uint2& v) { v = __ldcs(reinterpret_cast<const uint2*>(p)); }

/// A warp a row, four rows in flight, 16 bytes a lane (T: 8 where rows are no multiple of 16), the lanes aligned to the 128-byte lines of the
/// row: over PCIe every request counts.
template <class T>
__global__ void __launch_bounds__(kThreads)
    gather(const char* host, const std::int32_t* rows, std::int64_t n, std::int64_t row_bytes, char* to) {
  constexpr int kFlight = 4, kPiece = sizeof(T);
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const std::int64_t warp = (std::int64_t{blockIdx.x} * kThreads + threadIdx.x) / 32, warps = std::int64_t{gridDim.x} * (kThreads / 32);
  for (std::int64_t r = warp; r < n; r += warps * kFlight) {
    const char* from[kFlight];
    int skew[kFlight];
#pragma unroll
    for (int k = 0; k < kFlight; ++k) {
      from[k] = r + k * warps < n ? host + rows[r + k * warps] * row_bytes : nullptr;
      skew[k] = static_cast<int>(reinterpret_cast<std::uintptr_t>(from[k]) & 127);
    }
    for (std::int64_t at = lane * kPiece; at < row_bytes + 128 - kPiece; at += 32 * kPiece) {
      T v[kFlight];
#pragma unroll
      for (int k = 0; k < kFlight; ++k)
        if (from[k] && at >= skew[k] && at - skew[k] < row_bytes) load_piece(from[k] + at - skew[k], v[k]);
#pragma unroll
      for (int k = 0; k < kFlight; ++k)
        if (from[k] && at >= skew[k] && at - skew[k] < row_bytes)
          *reinterpret_cast<T*>(to + (r + k * warps) * row_bytes + at - skew[k]) = v[k];
    }
  }
}

__global__ void nothing() {}

double median(std::vector<double> x) {
  std::nth_element(x.begin(), x.begin() + static_cast<std::ptrdiff_t>(x.size() / 2), x.end());
  return x[x.size() / 2];
}

/// Scratch that the ceilings share; never freed before the process ends.
GpuArray& scratch(std::size_t bytes, GpuArray::Place place) {
  static std::map<GpuArray::Place, std::unique_ptr<GpuArray>> all;
  auto& array = all[place];
  if (!array || array->bytes() < bytes) array = std::make_unique<GpuArray>(bytes, place);
  return *array;
}

std::map<std::tuple<int, std::int64_t, std::int64_t>, double>& known() {
  static std::map<std::tuple<int, std::int64_t, std::int64_t>, double> all;
  return all;
}

}  // namespace

GpuArray::GpuArray(std::size_t bytes, Place place) : bytes_(bytes), place_(place) {
  const std::size_t whole = (bytes + 255) / 256 * 256;
  if (place == Place::kDevice)
    SPECSTATE_CUDA_CHECK(cudaMalloc(&data_, whole));
  else
    SPECSTATE_CUDA_CHECK(cudaHostAlloc(&data_, whole, cudaHostAllocDefault));
  fill_random<<<1024, 256>>>(static_cast<std::uint32_t*>(data_), static_cast<std::int64_t>(whole / 4), 1u);
  SPECSTATE_CUDA_CHECK(cudaDeviceSynchronize());
}
GpuArray::~GpuArray() {
  if (place_ == Place::kDevice)
    cudaFree(data_);
  else
    cudaFreeHost(data_);
}
TensorView GpuArray::view(DType dtype, std::initializer_list<std::int64_t> shape) const {
  const TensorView v(data_, dtype, shape, place_ == Place::kDevice ? Device{DeviceType::kCuda, 0} : Device{DeviceType::kCpu, 0, true});
  if (v.numel() * size_of(dtype) > static_cast<std::int64_t>(bytes_))
    throw Error(ErrorKind::kInternal, "GpuArray: the view is larger than the array");
  return v;
}
void empty_kernel(cudaStream_t stream) {
  nothing<<<1, 32, 0, stream>>>();
  SPECSTATE_CUDA_CHECK(cudaGetLastError());
}

void GpuArray::fill_bfloat16(float scale, unsigned seed) {
  fill_floats<<<1024, 256>>>(nullptr, data<std::uint16_t>(), static_cast<std::int64_t>(bytes_ / 2), scale, seed);
  SPECSTATE_CUDA_CHECK(cudaDeviceSynchronize());
}
void GpuArray::fill_float32(float scale, unsigned seed) {
  fill_floats<<<1024, 256>>>(data<float>(), nullptr, static_cast<std::int64_t>(bytes_ / 4), scale, seed);
  SPECSTATE_CUDA_CHECK(cudaDeviceSynchronize());
}
void GpuArray::upload(const void* host, std::size_t bytes) {
  if (bytes > bytes_) throw Error(ErrorKind::kInternal, "GpuArray: more than its size is uploaded");
  SPECSTATE_CUDA_CHECK(cudaMemcpy(data_, host, bytes, cudaMemcpyDefault));
}

Gpu::Gpu(const Report& report) : quick_(report.quick()) {
  const cuda::DeviceInfo& info = cuda::device_info();
  multiprocessors_ = info.multiprocessors;
  flush_bytes_ = std::size_t{4} * static_cast<std::size_t>(info.l2_bytes);
  flush_ = scratch(std::max<std::size_t>(flush_bytes_, std::size_t{1} << 30), GpuArray::Place::kDevice).data();
  SPECSTATE_CUDA_CHECK(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking));
  SPECSTATE_CUDA_CHECK(cudaEventCreate(&begin_));
  SPECSTATE_CUDA_CHECK(cudaEventCreate(&end_));
}
Gpu::~Gpu() {
  cudaEventDestroy(begin_), cudaEventDestroy(end_);
  cudaStreamDestroy(stream_);
}

void Gpu::flush(cudaStream_t stream) const {
  read_all<<<2 * multiprocessors_, kThreads, 0, stream>>>(static_cast<const uint4*>(flush_), static_cast<std::int64_t>(flush_bytes_ / 16),
                                                          nullptr);
}

struct Gpu::Graph {
  cudaGraphExec_t exec = nullptr;
  Graph(cudaStream_t stream, int repeats, const std::function<void(int)>& body) {
    SPECSTATE_CUDA_CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
    for (int i = 0; i < repeats; ++i) body(i);
    cudaGraph_t graph = nullptr;
    SPECSTATE_CUDA_CHECK(cudaStreamEndCapture(stream, &graph));
    SPECSTATE_CUDA_CHECK(cudaGraphInstantiate(&exec, graph, 0));
    cudaGraphDestroy(graph);
  }
  Graph(Graph&& other) noexcept : exec(other.exec) { other.exec = nullptr; }
  ~Graph() {
    if (exec) cudaGraphExecDestroy(exec);
  }
};

double Gpu::time_us(Graph& graph) const {
  float ms = 0;
  SPECSTATE_CUDA_CHECK(cudaEventRecord(begin_, stream_));
  SPECSTATE_CUDA_CHECK(cudaGraphLaunch(graph.exec, stream_));
  SPECSTATE_CUDA_CHECK(cudaEventRecord(end_, stream_));
  SPECSTATE_CUDA_CHECK(cudaEventSynchronize(end_));
  SPECSTATE_CUDA_CHECK(cudaEventElapsedTime(&ms, begin_, end_));
  return ms * 1e3;
}

std::vector<double> Gpu::cold_us(const std::vector<Call>& calls, const Call& before, int rounds) {
  const Stream stream{stream_};
  const auto graph_of = [&](int repeats, const Call* call) {
    return Graph(stream_, repeats, [&](int i) {
      if (before) before(stream, i);
      flush(stream_);
      if (call) (*call)(stream, i);
    });
  };
  // Long calls need few repeats: a replay takes some 2 ms.
  double longest = 0;
  for (const Call& call : calls) {
    Graph once = graph_of(1, &call);
    time_us(once);
    longest = std::max(longest, time_us(once));
  }
  const int repeats = quick_ ? 2 : std::clamp(static_cast<int>(2000 / longest), longest > 1000 ? 2 : 4, 24);
  if (longest > 500) rounds = std::min(rounds, 7);  // what disturbs a call is microseconds
  if (quick_) rounds = 3;
  Graph without = graph_of(repeats, nullptr);
  std::vector<Graph> with;
  for (const Call& call : calls) with.push_back(graph_of(repeats, &call));
  std::vector<std::vector<double>> samples(calls.size());
  for (int round = -1; round < rounds; ++round) {  // the first warms up
    const double rest = time_us(without);
    for (std::size_t c = 0; c < calls.size(); ++c) {
      const double us = (time_us(with[c]) - rest) / repeats;
      if (round >= 0) samples[c].push_back(us);
    }
  }
  std::vector<double> result;
  for (auto& s : samples) result.push_back(median(s));
  return result;
}

double Gpu::warm_us(const Call& call) {
  Graph once(stream_, 1, [&](int i) { call({stream_}, i); });
  time_us(once);
  const int repeats = quick_ ? 4 : std::clamp(static_cast<int>(2000 / std::max(1.0, time_us(once))), 4, 200), rounds = quick_ ? 3 : 21;
  Graph many(stream_, repeats, [&](int i) { call({stream_}, i); });
  std::vector<double> samples;
  time_us(many);
  for (int round = 0; round < rounds; ++round) samples.push_back(time_us(many) / repeats);
  return median(samples);
}

double Gpu::stream_us(std::int64_t read_bytes, std::int64_t write_bytes, bool in_place) {
  const auto key = std::make_tuple(in_place ? 1 : 0, read_bytes, write_bytes);
  if (const auto i = known().find(key); i != known().end()) return i->second;
  const std::int64_t in = (read_bytes + 15) / 16, out = (write_bytes + 15) / 16;
  auto* base =
      static_cast<uint4*>(scratch(std::size_t{16} * static_cast<std::size_t>(in + out) + flush_bytes_, GpuArray::Place::kDevice).data());
  flush_ = base;  // scratch may have moved
  uint4* from = base + flush_bytes_ / 16;
  uint4* to = in_place ? from : from + in;
  std::vector<Call> grids;
  for (const int blocks : {1, 2, 3, 4})
    for (const bool wide : {false, true})
      grids.push_back([=, this](Stream s, int) {
        if (wide)
          stream_kernel<8><<<blocks * multiprocessors_, kThreads, 0, cuda::native(s)>>>(from, in, to, out, nullptr);
        else
          stream_kernel<4><<<blocks * multiprocessors_, kThreads, 0, cuda::native(s)>>>(from, in, to, out, nullptr);
      });
  const std::vector<double> us = cold_us(grids, {}, 7);
  return known()[key] = *std::min_element(us.begin(), us.end());
}

double Gpu::host_gather_us(std::int64_t rows, std::int64_t row_bytes) {
  if (rows == 0) return 0;
  if (row_bytes % 8 != 0)
    throw Error(ErrorKind::kInternal, "internal error: rows of " + std::to_string(row_bytes) + " bytes are not gathered");
  const auto key = std::make_tuple(2, rows, row_bytes);
  if (const auto i = known().find(key); i != known().end()) return i->second;
  const std::int64_t pool = std::max<std::int64_t>(rows, (std::int64_t{256} << 20) / row_bytes);
  const GpuArray& host = scratch(static_cast<std::size_t>(pool * row_bytes), GpuArray::Place::kPinned);
  const GpuArray to(static_cast<std::size_t>(rows * row_bytes));
  std::vector<std::int32_t> order(static_cast<std::size_t>(pool));
  std::iota(order.begin(), order.end(), 0);
  std::shuffle(order.begin(), order.end(), std::mt19937(1));
  order.resize(static_cast<std::size_t>(rows));
  GpuArray index(order.size() * 4);
  index.set(order);
  std::vector<Call> grids;
  for (const int blocks : {8, 16, 32, 66})
    grids.push_back([&, blocks](Stream s, int) {
      const auto kernel = row_bytes % 16 == 0 ? gather<uint4> : gather<uint2>;
      kernel<<<blocks, kThreads, 0, cuda::native(s)>>>(host.data<char>(), index.data<std::int32_t>(), rows, row_bytes, to.data<char>());
    });
  const std::vector<double> us = cold_us(grids, {}, 7);
  return known()[key] = *std::min_element(us.begin(), us.end());
}

double Gpu::launch_us() {
  const auto key = std::make_tuple(3, std::int64_t{0}, std::int64_t{0});
  if (!known().count(key)) known()[key] = cold_us([](Stream s, int) { nothing<<<1, 32, 0, cuda::native(s)>>>(); });
  return known()[key];
}

double Gpu::copy_engine_gbs(bool to_host) {
  const auto key = std::make_tuple(4, std::int64_t{to_host}, std::int64_t{0});
  if (const auto i = known().find(key); i != known().end()) return i->second;
  constexpr std::size_t kBytes = std::size_t{256} << 20;
  const GpuArray& host = scratch(kBytes, GpuArray::Place::kPinned);
  const GpuArray there(kBytes);
  double best = 1e300;
  for (int i = 0; i < (quick_ ? 2 : 6); ++i) {
    Graph copy(stream_, 1, [&](int) {
      SPECSTATE_CUDA_CHECK(cudaMemcpyAsync(to_host ? host.data() : there.data(), to_host ? there.data() : host.data(), kBytes,
                                           to_host ? cudaMemcpyDeviceToHost : cudaMemcpyHostToDevice, stream_));
    });
    best = std::min(best, time_us(copy));
  }
  return known()[key] = static_cast<double>(kBytes) / best * 1e-3;
}
double Gpu::host_to_device_gbs() { return copy_engine_gbs(false); }
double Gpu::device_to_host_gbs() { return copy_engine_gbs(true); }

std::string Gpu::name() {
  cudaDeviceProp p{};
  SPECSTATE_CUDA_CHECK(cudaGetDeviceProperties(&p, 0));
  return p.name;
}

namespace {
const bool registered = [] {
  gpu_machine() = {Gpu::name, [](bool quick) { return Gpu(Report("ceilings", {.device = "cuda", .quick = quick})).ceilings(); }};
  return true;
}();
}  // namespace

std::map<std::string, double> Gpu::ceilings() {
  constexpr std::int64_t kLarge = std::int64_t{384} << 20;
  const auto gbs = [](std::int64_t bytes, double us) { return static_cast<double>(bytes) / us * 1e-3; };
  const std::int64_t rows = quick_ ? 782 : 50048;
  return {{"read_gbs", gbs(kLarge, stream_us(kLarge, 0))},
          {"write_gbs", gbs(kLarge, stream_us(0, kLarge))},
          {"read_write_gbs", gbs(2 * kLarge, stream_us(kLarge, kLarge, true))},
          {"host_gather_576_gbs", gbs(rows * 576, host_gather_us(rows, 576))},
          {"host_gather_656_gbs", gbs(rows * 656, host_gather_us(rows, 656))},
          {"host_gather_1152_gbs", gbs(rows * 1152, host_gather_us(rows, 1152))},
          {"host_to_device_gbs", host_to_device_gbs()},
          {"device_to_host_gbs", device_to_host_gbs()},
          {"launch_us", launch_us()}};
}

}  // namespace specstate::bench
