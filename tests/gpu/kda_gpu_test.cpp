// KDA on a GPU: against the CPU backend within the tolerances of the specification, and against itself bit for bit.
#include <cuda_runtime.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <numeric>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "core/numeric.hpp"
#include "gpu_test.hpp"
#include "kda/cuda/backend.hpp"
#include "specstate/kda.hpp"

using namespace specstate;
using namespace specstate::kda;
using core::bfloat16;

namespace {

using Arena = gpu_test::Arena<false>;

/// A tensor on both sides; what is between its rows (pitches) is poisoned like everything that a call writes.
struct Buffer {
  std::vector<unsigned char> host;
  unsigned char* device = nullptr;
  TensorView shape;                     // without a pointer
  static inline bool together = false;  // uploads wait for `copy_together`

  Buffer() = default;
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  ~Buffer() { Arena::get().give(device, host.size()); }

  void make(DType dtype, std::initializer_list<std::int64_t> sizes, std::int64_t pitch = 0) {
    shape = TensorView(nullptr, dtype, sizes);
    if (pitch) shape.strides[0] = pitch;
    std::int64_t last = 0;
    for (int i = 0; i < shape.ndim; ++i) {
      if (shape.sizes[i] == 0) return;
      last += (shape.sizes[i] - 1) * shape.strides[i];
    }
    host.assign(static_cast<std::size_t>((last + 1) * size_of(dtype)), 0xFF);  // NaN, -1
    device = Arena::get().take(host.size());
    upload();
  }
  void upload() {
    if (!together) gpu_test::Crossing::get().up(device, host.data(), host.size());
  }
  void download() { std::memcpy(host.data(), there(device, host.size()), host.size()); }
  /// What the device holds, when everything before is done; until the next of these.
  static const unsigned char* there(const unsigned char* device, std::size_t bytes) {
    unsigned char* const here = gpu_test::Crossing::get().down(bytes);
    cudaMemcpyAsync(here, device, bytes, cudaMemcpyDeviceToHost, nullptr);
    const cudaError_t status = gpu_test::Crossing::get().wait();
    EXPECT_EQ(status, cudaSuccess) << cudaGetErrorString(status);
    return here;
  }
  void poison() {
    std::fill(host.begin(), host.end(), 0xFF);
    poison_device();
  }
  void poison_device() { cudaMemset(device, 0xFF, host.size()); }
  TensorView view(bool gpu) const {
    TensorView t = shape;
    if (!t.given()) return t;
    t.data = gpu ? static_cast<void*>(device) : const_cast<unsigned char*>(host.data());
    t.device = {gpu ? DeviceType::kCuda : DeviceType::kCpu, 0};
    return t;
  }
  float at(std::size_t i) const {
    if (shape.dtype == DType::kBFloat16) return core::to_float(reinterpret_cast<const bfloat16*>(host.data())[i]);
    return reinterpret_cast<const float*>(host.data())[i];
  }
  void set(std::size_t i, float x) {
    if (shape.dtype == DType::kBFloat16)
      reinterpret_cast<bfloat16*>(host.data())[i] = core::from_float<bfloat16>(x);
    else
      reinterpret_cast<float*>(host.data())[i] = x;
  }
  std::size_t count() const { return host.size() / static_cast<std::size_t>(size_of(shape.dtype)); }
};

/// All of them by one copy where they lie close together.
void copy_together(const std::vector<Buffer*>& buffers, bool upload) {
  unsigned char *low = nullptr, *high = nullptr;
  std::size_t sum = 0;
  bool near = true;
  for (const Buffer* x : buffers) {
    near = near && Arena::get().owns(x->device);
    if (!low || x->device < low) low = x->device;
    if (!high || x->device + x->host.size() > high) high = x->device + x->host.size();
    sum += (x->host.size() + 255) / 256 * 256;
  }
  if (!near || buffers.size() < 2 || static_cast<std::size_t>(high - low) > (upload ? sum : 4 * sum)) {
    for (Buffer* x : buffers) upload ? x->upload() : x->download();
    return;
  }
  const std::size_t size = static_cast<std::size_t>(high - low);
  if (upload) {
    std::vector<unsigned char> packed(size);
    for (Buffer* x : buffers) std::memcpy(packed.data() + (x->device - low), x->host.data(), x->host.size());
    gpu_test::Crossing::get().up(low, packed.data(), size);
  } else {
    const unsigned char* const packed = Buffer::there(low, size);
    for (Buffer* x : buffers) std::memcpy(x->host.data(), packed + (x->device - low), x->host.size());
  }
}

struct Options {
  unsigned seed = 1;
  std::int64_t H = 2, G = 1, K = 128, V = 128;
  std::vector<int> lens = {8, 8, 8};
  bool act_bf16 = true, state_bf16 = false, scalar_gate = false, safe = true, norm = true, conv = true, wide = false, tap_rows = true;
  bool snapshots = false, rings = true;
  bool odd_windows = false;           // requests' windows begin at multiples of 8 bytes, not of 16
  int null_row = -1;                  // this request is padding
  std::vector<std::int32_t> parents;  // [N, longest]
  std::string name() const {
    std::string s = "H" + std::to_string(H) + " G" + std::to_string(G) + " K" + std::to_string(K) + " V" + std::to_string(V) + " lens";
    for (int n : lens) s += " " + std::to_string(n);
    return s + (act_bf16 ? " bf16" : " f32") + (state_bf16 ? " state16" : "") + (scalar_gate ? " gdn" : "") + (safe ? "" : " softplus") +
           (norm ? "" : " nonorm") + (conv ? "" : " noconv") + (tap_rows ? "" : " interleaved") + (parents.empty() ? "" : " tree");
  }
};

/// A call with memory of its own.
struct Case {
  Options o;
  std::int64_t N, T = 0, HV, pool, longest = 1;
  std::map<std::string, Buffer> b;

  explicit Case(const Options& options) : o(options), N(static_cast<std::int64_t>(o.lens.size())), HV(o.H * o.G), pool(N + 2) {
    std::mt19937 rng(o.seed);
    std::normal_distribution<float> normal;
    Buffer::together = true;
    const DType act = o.act_bf16 ? DType::kBFloat16 : DType::kFloat32, f32 = DType::kFloat32;
    const DType idx = o.wide ? DType::kInt64 : DType::kInt32, state = o.state_bf16 ? DType::kBFloat16 : f32;
    for (int n : o.lens) T += n, longest = std::max<std::int64_t>(longest, n);
    const auto fill = [&](const char* name, DType dtype, std::initializer_list<std::int64_t> sizes, float scale = 1,
                          std::int64_t pitch = 0) {
      Buffer& x = b[name];
      x.make(dtype, sizes, pitch);
      for (std::size_t i = 0; i < x.count(); ++i) x.set(i, scale * normal(rng));
      x.upload();
    };
    const std::int64_t H = o.H, K = o.K, V = o.V, gates = o.scalar_gate ? 1 : K;
    // q, k and v as views of one projection: every token's row is longer than its tensor
    fill("x_q", act, {T, H, K}, 1, 2 * H * K + HV * V), fill("x_k", act, {T, H, K}), fill("x_v", act, {T, HV, V});
    if (o.conv) {
      fill("w_q", f32, {H * K, 4}, .3f), fill("w_k", f32, {H * K, 4}, .3f), fill("w_v", f32, {HV * V, 4}, .3f);
      fill("cs_q", act, {pool, H * K, 3}), fill("cs_k", act, {pool, H * K, 3}), fill("cs_v", act, {pool, HV * V, 3});
    }
    if (o.scalar_gate)
      fill("g", act, {T, HV}), fill("dt_bias", f32, {HV});
    else
      fill("g", act, {T, HV, gates}), fill("dt_bias", f32, {HV, gates});
    fill("beta", act, {T, HV}), fill("A_log", f32, {HV}, .5f);
    fill("state", state, {pool, HV, V, K}, .5f, HV * V * K + 64);
    if (o.norm) fill("gate", act, {T, HV, V}), fill("weight", f32, {V});
    // What a call writes, one behind the other.
    if (o.conv) {
      const std::int64_t odd = o.odd_windows ? 4 : 0;
      for (const char* name : {"conv_q", "conv_k"}) b[name].make(act, {N, longest, H * K, 3}, longest * H * K * 3 + odd);
      b["conv_v"].make(act, {N, longest, HV * V, 3}, longest * HV * V * 3 + odd);
      if (o.tap_rows)
        for (const char* name : {"cs_q", "cs_k", "cs_v", "conv_q", "conv_k", "conv_v"}) {
          TensorView& t = b[name].shape;
          t.strides[t.ndim - 2] = 1, t.strides[t.ndim - 1] = t.sizes[t.ndim - 2];
        }
    }
    b["out"].make(act, {T, HV, V});
    b["rawv"].make(act, {pool, HV, longest, V}), b["rawk"].make(act, {pool, H, longest, K});
    if (o.scalar_gate)
      b["ring_g"].make(f32, {pool, HV, longest});
    else
      b["ring_g"].make(f32, {pool, HV, longest, K});
    b["ring_beta"].make(f32, {pool, HV, longest});
    if (o.snapshots) b["snapshots"].make(state, {N, longest, HV, V, K});
    std::vector<std::int64_t> slots(static_cast<std::size_t>(pool)), cu = {0}, rows(static_cast<std::size_t>(N));
    std::iota(slots.begin(), slots.end(), 0), std::iota(rows.begin(), rows.end(), 0);
    std::shuffle(slots.begin(), slots.end(), rng), std::shuffle(rows.begin(), rows.end(), rng);
    for (int n : o.lens) cu.push_back(cu.back() + n);
    slots.resize(static_cast<std::size_t>(N));
    if (o.null_row >= 0) slots[static_cast<std::size_t>(o.null_row)] = -1;
    indices("slots", idx, slots), indices("rows", idx, rows), indices("cu", idx, cu);
    if (!o.parents.empty()) {
      indices("parents", idx, {o.parents.begin(), o.parents.end()});
      b["parents"].shape = TensorView(nullptr, idx, {N, longest});
    }
    Buffer::together = false;
    std::vector<Buffer*> all;
    for (auto& [name, x] : b)
      if (!x.host.empty()) all.push_back(&x);
    copy_together(all, true);
  }
  void indices(const char* name, DType dtype, const std::vector<std::int64_t>& values) {
    Buffer& x = b[name];
    if (x.device) Arena::get().give(x.device, x.host.size()), x.device = nullptr;
    x.make(dtype, {static_cast<std::int64_t>(values.size())});
    for (std::size_t i = 0; i < values.size(); ++i)
      if (dtype == DType::kInt64)
        reinterpret_cast<std::int64_t*>(x.host.data())[i] = values[i];
      else
        reinterpret_cast<std::int32_t*>(x.host.data())[i] = static_cast<std::int32_t>(values[i]);
    x.upload();
  }
  std::int64_t slot(std::int64_t r) const {
    const Buffer& x = b.at("slots");
    return o.wide ? reinterpret_cast<const std::int64_t*>(x.host.data())[r] : reinterpret_cast<const std::int32_t*>(x.host.data())[r];
  }
  std::int64_t row(std::int64_t r) const {
    const Buffer& x = b.at("rows");
    return o.wide ? reinterpret_cast<const std::int64_t*>(x.host.data())[r] : reinterpret_cast<const std::int32_t*>(x.host.data())[r];
  }

  template <class Params>
  Params step(bool gpu) {
    const auto v = [&](const char* name) { return b.count(name) ? b[name].view(gpu) : TensorView(); };
    Params p;
    p.x_q = v("x_q"), p.x_k = v("x_k"), p.x_v = v("x_v"), p.w_q = v("w_q"), p.w_k = v("w_k"), p.w_v = v("w_v");
    p.cs_q = v("cs_q"), p.cs_k = v("cs_k"), p.cs_v = v("cs_v"), p.g = v("g"), p.beta = v("beta"), p.A_log = v("A_log"),
    p.dt_bias = v("dt_bias");
    p.state = v("state"), p.slots = v("slots"), p.cu_seqlens = v("cu"), p.out = v("out");
    p.onorm_gate = v("gate"), p.onorm_weight = v("weight");
    if (o.norm) p.onorm_eps = 1e-5;
    if (o.safe) p.lower_bound = -5.0;
    return p;
  }
  Rings ring_views(bool gpu) { return {b["rawv"].view(gpu), b["rawk"].view(gpu), b["ring_g"].view(gpu), b["ring_beta"].view(gpu)}; }
  VerifyParams verify_params(bool gpu) {
    auto p = step<VerifyParams>(gpu);
    if (o.rings) p.rings = ring_views(gpu);
    if (o.snapshots) p.snapshots = b["snapshots"].view(gpu);
    if (o.conv) p.conv_q = b["conv_q"].view(gpu), p.conv_k = b["conv_k"].view(gpu), p.conv_v = b["conv_v"].view(gpu);
    p.rows = b["rows"].view(gpu);
    if (!o.parents.empty()) p.parents = b["parents"].view(gpu);
    return p;
  }
  std::vector<std::string> outputs() const {
    std::vector<std::string> names = {"out", "rawv", "rawk", "ring_g", "ring_beta"};
    if (o.conv) names.insert(names.end(), {"conv_q", "conv_k", "conv_v"});
    if (o.snapshots) names.push_back("snapshots");
    return names;
  }
  /// Every output of a GPU call, after poisoning.
  std::map<std::string, std::vector<unsigned char>> on_gpu(bool exact) {
    for (const auto& name : outputs()) b[name].poison_device();
    VerifyParams p = verify_params(true);
    p.exact = exact;
    verify(p);
    return taken(outputs());
  }
  /// No tokens wait for a deferred fold.
  bool settled() {
    const auto counts = taken({"pending"}).at("pending");
    return std::all_of(counts.begin(), counts.end(), [](unsigned char byte) { return byte == 0; });
  }
  std::map<std::string, std::vector<unsigned char>> taken(const std::vector<std::string>& names) {
    std::vector<Buffer*> buffers;
    for (const auto& name : names) buffers.push_back(&b[name]);
    copy_together(buffers, false);
    std::map<std::string, std::vector<unsigned char>> all;
    for (const auto& name : names) all[name] = b[name].host;
    return all;
  }
};

struct Forcing {
  Forcing(int rows, int frozen = -1, int frame = -1, int warps = 0) {
    kda::cuda::Forced& f = kda::cuda::forced();
    f.rows = rows, f.frozen = frozen, f.frame = frame, f.warps = warps;
  }
  ~Forcing() { kda::cuda::forced() = {}; }
};

std::int64_t ordered(std::int64_t i, std::int64_t low) { return i < 0 ? -(i & low) : i; }
std::int64_t ulps(const Buffer& shape, const std::vector<unsigned char>& a, const std::vector<unsigned char>& b, std::size_t i) {
  if (shape.shape.dtype == DType::kBFloat16) {
    const auto x = reinterpret_cast<const std::int16_t*>(a.data())[i], y = reinterpret_cast<const std::int16_t*>(b.data())[i];
    return std::abs(ordered(x, 0x7FFF) - ordered(y, 0x7FFF));
  }
  const auto x = reinterpret_cast<const std::int32_t*>(a.data())[i], y = reinterpret_cast<const std::int32_t*>(b.data())[i];
  return std::abs(ordered(x, 0x7FFFFFFF) - ordered(y, 0x7FFFFFFF));
}
float value(const Buffer& shape, const std::vector<unsigned char>& a, std::size_t i) {
  if (shape.shape.dtype == DType::kBFloat16) return core::to_float(reinterpret_cast<const bfloat16*>(a.data())[i]);
  return reinterpret_cast<const float*>(a.data())[i];
}

struct Difference {
  double relative = 0;  // largest difference over the largest element
  double elementwise = 0;
  double changed = 0;     // share of elements that differ by more than one unit of bf16 (or at all in float32)
  std::int64_t most = 0;  // units in the last place
  bool poison = true;     // NaN on one side is NaN on the other
};
Difference compare(const Buffer& shape, const std::vector<unsigned char>& a, const std::vector<unsigned char>& b) {
  Difference d;
  double largest = 0, apart = 0, changed = 0, n = 0;
  for (std::size_t i = 0; i < shape.count(); ++i) {
    const float x = value(shape, a, i), y = value(shape, b, i);
    if (std::isnan(x) || std::isnan(y)) {
      d.poison = d.poison && std::isnan(x) && std::isnan(y);
      continue;
    }
    largest = std::max<double>(largest, std::abs(x)), apart = std::max<double>(apart, std::abs(x - y));
    if (x != 0) d.elementwise = std::max<double>(d.elementwise, std::abs((x - y) / x));
    const std::int64_t u = ulps(shape, a, b, i);
    if (std::max(std::abs(x), std::abs(y)) > 1e-3) d.most = std::max(d.most, u);
    changed += u > 0, ++n;
  }
  d.relative = apart / std::max(largest, 1e-30), d.changed = n > 0 ? changed / n : 0;
  return d;
}

std::vector<Options> cases() {
  std::vector<Options> all;
  const auto add = [&](auto&& change) {
    Options o;
    o.seed = static_cast<unsigned>(all.size() + 1);
    change(o);
    all.push_back(o);
  };
  if (gpu_test::small()) {
    add([&](Options& o) { o.H = 1, o.lens = {2, 9, 1}, o.null_row = 2; });
    add([&](Options& o) { o.H = 1, o.lens = {16, 17, 1}, o.null_row = 2; });
    add([&](Options& o) { o.H = 1, o.lens = {2, 5, 1}, o.null_row = 2; });
    add([&](Options& o) { o.H = 1, o.lens = {3}, o.K = 64, o.V = 64, o.tap_rows = false, o.scalar_gate = true; });
    return all;
  }
  for (int n = 1; n <= 16; ++n) add([&](Options& o) { o.lens = {n, n, n}; });
  add([](Options& o) { o.lens = {1, 5, 0, 3, 16, 2}, o.null_row = 3, o.wide = true; });
  add([](Options& o) { o.lens = {1, 5, 0, 3, 8, 2}, o.null_row = 3, o.wide = true; });
  add([](Options& o) { o.lens = {40, 3}; });
  add([](Options& o) { o.tap_rows = false; });
  add([](Options& o) {  // more heads than the GPU holds at once
    o.H = 24, o.lens = {8, 3, 8, 1, 9, 8, 0, 8, 8, 12, 2, 8}, o.null_row = 4;
  });
  add([](Options& o) { o.safe = false; });
  add([](Options& o) { o.scalar_gate = true, o.safe = false; });
  add([](Options& o) { o.norm = false; });
  add([](Options& o) { o.conv = false, o.G = 2; });
  add([](Options& o) { o.H = 1, o.G = 3; });
  add([](Options& o) { o.K = 64, o.V = 64; });
  add([](Options& o) { o.K = 64, o.V = 128; });
  add([](Options& o) { o.K = 128, o.V = 64; });
  add([](Options& o) { o.act_bf16 = false; });
  add([](Options& o) { o.act_bf16 = false, o.K = 64, o.V = 64, o.lens = {5, 2}; });
  add([](Options& o) { o.state_bf16 = true; });
  add([](Options& o) { o.act_bf16 = false, o.state_bf16 = true, o.K = 64; });
  add([](Options& o) { o.odd_windows = true; });
  return all;
}

class KdaGpu : public ::testing::Test {
 protected:
  void SetUp() override { SPECSTATE_NEEDS_GPU(); }
};

TEST_F(KdaGpu, AgreesWithTheCpu) {
  for (Options o : cases())
    for (bool snapshots : {false, true}) {
      o.snapshots = snapshots;
      Case c(o);
      const auto exact_gpu = c.on_gpu(true), fast_gpu = c.on_gpu(false);
      for (const auto& name : c.outputs()) c.b[name].poison();
      verify(c.verify_params(false));
      for (bool exact : {true, false}) {
        const auto& gpu = exact ? exact_gpu : fast_gpu;
        std::string line = o.name() + (exact ? " exact" : "");
        for (const auto& name : c.outputs()) {
          const Buffer& x = c.b[name];
          const Difference d = compare(x, gpu.at(name), x.host);
          EXPECT_TRUE(d.poison) << line << " " << name;
          if (name.substr(0, 4) == "conv") EXPECT_EQ(gpu.at(name), x.host) << line << " " << name;
          if (name == "rawk" || name == "rawv") {
            if (o.act_bf16)
              EXPECT_TRUE(d.most <= 1 && d.changed < 1e-3) << line << " " << name << " " << d.most << " " << d.changed;
            else
              EXPECT_LT(d.relative, 2e-6) << line << " " << name;
          }
          // Each is within 2e-6 of the truth (test_kda_gpu.py).
          if (name == "ring_g" || name == "ring_beta") EXPECT_LT(d.elementwise, 4e-6) << line << " " << name;
          if (name == "snapshots") EXPECT_LT(d.relative, o.act_bf16 || o.state_bf16 ? 8e-3 : 3e-6) << line << " " << name;
          if (name == "out") {
            if (o.act_bf16)
              EXPECT_TRUE(d.changed <= 0.02 && d.relative < 8e-3) << line << " out " << d.changed << " " << d.relative;
            else
              EXPECT_LT(d.relative, o.state_bf16 ? 1e-2 : 3e-6) << line << " out";
          }
          char text[128];
          std::snprintf(text, sizeof text, "  %s %.1e %.2e %lld", name.c_str(), d.relative, d.changed, static_cast<long long>(d.most));
          if (name.substr(0, 4) != "conv") line += text;
        }
        std::printf("%s\n", line.c_str());
      }
    }
}

/// Each way of cutting a call into blocks gives the same bits, by the recurrence or from a frozen state.
void bits_of_every_launch(int frozen) {
  std::vector<Options> all = cases();
  if (!gpu_test::small())
    for (int heads : {32, 40}) {  // three of a multiprocessor, and some that wait; a block of tokens at most
      Options o;
      o.H = heads, o.lens = {8, 3, 8, 1, 7, 8, 0, 8, 8, 5, 2, 8}, o.null_row = 4;
      all.push_back(o);
    }
  for (const Options& o : all) {
    Case c(o);
    std::map<std::string, std::vector<unsigned char>> first;
    const auto same = [&](int rows, int frame, int warps) {
      const Forcing forcing(rows, frozen, frame, warps);
      const auto now = c.on_gpu(false);
      if (first.empty()) first = now;
      for (const auto& [name, bytes] : now)
        EXPECT_TRUE(bytes == first.at(name)) << o.name() << " " << name << " rows " << rows << " frozen " << frozen << " frame " << frame
                                             << " warps " << warps;
    };
    if (frozen) {
      for (int warps : {0, 3, 4, 8, 16}) same(0, 1, warps);
    } else {
      for (int rows : {8, 4, 2, 1}) same(rows, 0, 0);
      same(0, 1, 0);
    }
  }
}
TEST_F(KdaGpu, BitsDoNotDependOnTheLaunch) { bits_of_every_launch(0); }
TEST_F(KdaGpu, FrozenBitsDoNotDependOnTheLaunch) { bits_of_every_launch(1); }

/// The frozen form against the recurrence: the same records, outputs within a unit of bfloat16 in a thousandth of them.
TEST_F(KdaGpu, FrozenFormIsTheRecurrenceWithinRounding) {
  for (const Options& o : cases()) {
    Case c(o);
    const auto exact = c.on_gpu(true), frozen = c.on_gpu(false);
    for (const auto& [name, bytes] : exact)
      if (name != "out") EXPECT_EQ(bytes, frozen.at(name)) << o.name() << " " << name;
    const Difference d = compare(c.b["out"], exact.at("out"), frozen.at("out"));
    const double count = static_cast<double>(c.b["out"].count());
    EXPECT_TRUE(d.poison && d.changed * count <= std::max(3.0, 1e-3 * count) && d.most <= (o.act_bf16 ? 1 : 0))
        << o.name() << " " << d.changed << " " << d.most;
  }
}

TEST_F(KdaGpu, RingOutputIsSnapshotOutputAndFoldIsSnapshot) {
  for (Options o : cases()) {
    o.snapshots = true;
    Case c(o);
    std::map<std::string, std::vector<unsigned char>> both, ring;
    for (int frame : {0, 1}) {
      const Forcing forcing(0, -1, frame);
      c.o.snapshots = true;
      const auto now = c.on_gpu(true);
      if (both.empty()) both = now;
      for (const auto& [name, bytes] : now) EXPECT_TRUE(bytes == both.at(name)) << o.name() << " " << name << " frame " << frame;
      c.o.snapshots = false;
      ring = c.on_gpu(true);
      for (const auto& [name, bytes] : ring) EXPECT_TRUE(bytes == both.at(name)) << o.name() << " " << name << " frame " << frame;
    }
    const std::vector<unsigned char> before = c.b["state"].host;
    for (std::int64_t n : std::set<std::int64_t>{0, 1, c.longest / 2, c.longest})
      for (int rows : {0, 8, 2}) {
        if (gpu_test::small() && n < c.longest && (n != 1 || rows)) continue;
        const Forcing forcing(rows);
        c.b["state"].host = before, c.b["state"].upload();
        std::vector<std::int64_t> accept;
        for (int len : o.lens) accept.push_back(std::min<std::int64_t>(n, len));
        c.indices("accept", DType::kInt32, accept);
        FoldParams f;
        f.state = c.b["state"].view(true), f.rings = c.ring_views(true), f.slots = c.b["slots"].view(true),
        f.accept = c.b["accept"].view(true);
        fold(f);
        const auto folded = c.taken({"state"}).at("state");
        const std::int64_t size = o.state_bf16 ? 2 : 4, slot_bytes = c.HV * o.V * o.K * size, pitch = c.b["state"].shape.strides[0] * size;
        std::vector<unsigned char> want = before;
        for (std::int64_t r = 0; r < c.N; ++r)
          if (c.slot(r) >= 0 && accept[static_cast<std::size_t>(r)] > 0)
            std::memcpy(want.data() + c.slot(r) * pitch,
                        both.at("snapshots").data() + (c.row(r) * c.longest + accept[static_cast<std::size_t>(r)] - 1) * slot_bytes,
                        static_cast<std::size_t>(slot_bytes));
        EXPECT_TRUE(folded == want) << o.name() << " accept " << n << " rows " << rows;
      }
  }
}

TEST_F(KdaGpu, DecodeStepByStepIsVerify) {
  for (Options o : cases()) {
    if (o.null_row >= 0) continue;
    for (int& n : o.lens) n = o.lens[0];
    o.snapshots = true;
    Case c(o);
    const auto both = c.on_gpu(true);
    const std::int64_t W = o.lens[0];
    // one token at a time: cu_seqlens of single tokens cannot skip, so x is viewed with a pitch of W tokens
    Case d(o);
    for (std::int64_t i = 0; i < W; ++i) {
      auto p = d.step<DecodeParams>(true);
      p.cu_seqlens = {};
      for (TensorView* t : {&p.x_q, &p.x_k, &p.x_v, &p.g, &p.beta, &p.onorm_gate, &p.out}) {
        if (!t->given()) continue;
        t->data = static_cast<char*>(t->data) + i * t->strides[0] * size_of(t->dtype);
        t->strides[0] *= W, t->sizes[0] = d.N;
      }
      decode(p);
    }
    const auto stepped = d.taken({"out", "state", "cs_v"});
    EXPECT_EQ(stepped.at("out"), both.at("out")) << o.name();
    const std::int64_t size = o.state_bf16 ? 2 : 4, slot_bytes = c.HV * o.V * o.K * size, pitch = c.b["state"].shape.strides[0] * size;
    bool same = true;
    for (std::int64_t r = 0; r < c.N; ++r)
      same =
          same && std::memcmp(stepped.at("state").data() + c.slot(r) * pitch,
                              both.at("snapshots").data() + (c.row(r) * W + W - 1) * slot_bytes, static_cast<std::size_t>(slot_bytes)) == 0;
    EXPECT_TRUE(same) << o.name();
    // all at once
    Case e(o);
    decode(e.step<DecodeParams>(true));
    const auto once = e.taken({"out", "state", "cs_q", "cs_v"});
    EXPECT_EQ(once.at("out"), both.at("out")) << o.name();
    EXPECT_EQ(once.at("state"), stepped.at("state")) << o.name();
    EXPECT_EQ(once.at("cs_v"), stepped.at("cs_v")) << o.name();
  }
}

TEST_F(KdaGpu, TreePathsAreChains) {
  for (bool snapshots : {false, true}) {
    Options o;
    o.lens = {7, 7}, o.snapshots = snapshots;
    o.parents = {-1, 0, 0, 1, 2, 3, -1, -1, 0, 1, 1, 2, 2, 0};
    Case c(o);
    const auto tree = c.on_gpu(true);
    for (const auto& name : c.outputs()) c.b[name].poison();
    verify(c.verify_params(false));
    const Difference d = compare(c.b["out"], tree.at("out"), c.b["out"].host);
    EXPECT_TRUE(d.changed <= 0.02) << d.changed;
    std::printf("tree: out %.1e %.2e %lld\n", d.relative, d.changed, static_cast<long long>(d.most));
    EXPECT_EQ(tree.at("conv_v"), c.b["conv_v"].host);
    const std::vector<std::vector<int>> paths = {{0, 1, 3, 5}, {0, 2, 4}, {6}};  // of request 0
    for (const auto& path : paths) {
      Options chain = o;
      chain.parents.clear(), chain.snapshots = false;
      Case x(chain);
      for (const char* name : {"x_q", "x_k", "x_v", "g", "beta", "gate"}) {
        Buffer& y = x.b[name];
        const std::vector<unsigned char> all = y.host;
        const std::size_t pitch = static_cast<std::size_t>(y.shape.strides[0] * size_of(y.shape.dtype));
        for (std::size_t i = 0; i < path.size(); ++i)
          std::memcpy(y.host.data() + i * pitch, all.data() + static_cast<std::size_t>(path[i]) * pitch,
                      std::min(pitch, all.size() - path[i] * pitch));
        y.upload();
      }
      const auto got = x.on_gpu(true);
      const std::size_t bytes = static_cast<std::size_t>(c.HV * o.V * 2);
      for (std::size_t i = 0; i < path.size(); ++i)
        EXPECT_EQ(std::memcmp(got.at("out").data() + i * bytes, tree.at("out").data() + static_cast<std::size_t>(path[i]) * bytes, bytes),
                  0)
            << "node " << path[i];
    }
  }
}

/// Trees from a frozen state, of any shape: the records, windows and (within float32 rounding) outputs of the recurrence.
TEST_F(KdaGpu, FrozenTreesAgreeWithTheRecurrence) {
  std::vector<Options> all;
  const auto add = [&](int nodes, auto&& change) {
    Options o;
    o.seed = static_cast<unsigned>(all.size() + 11), o.lens = {nodes, nodes / 2 + 1, nodes, 1};
    change(o);
    std::mt19937 rng(o.seed);
    const int kind = static_cast<int>(all.size() % 4);  // random, bushy (parents among the first), deep (among the last), several roots
    for (std::size_t r = 0; r < o.lens.size(); ++r)
      for (int t = 0; t < nodes; ++t) {
        const int any = t ? static_cast<int>(rng() % static_cast<unsigned>(t)) : -1;
        o.parents.push_back(kind == 0 ? any : kind == 1 ? std::min(any, 2) : kind == 2 ? std::max(any, t - 2) : rng() % 4 == 0 ? -1 : any);
      }
    all.push_back(o);
  };
  const auto same = [](Options&) {};
  if (gpu_test::small()) {
    add(5, [](Options& o) { o.H = 1, o.K = 64, o.V = 64; });
    add(6, [](Options& o) { o.H = 1; });
  } else {
    for (int nodes : {1, 2, 7, 8, 9, 16, 23, 28}) add(nodes, same);
    add(16, [](Options& o) { o.act_bf16 = false; });
    add(12, [](Options& o) { o.H = 1, o.G = 3, o.wide = true, o.null_row = 1; });
    add(12, [](Options& o) { o.scalar_gate = true, o.safe = false; });
    add(12, [](Options& o) { o.safe = false, o.tap_rows = false; });
    add(12, [](Options& o) { o.norm = false, o.conv = false; });
    add(28, [](Options& o) { o.K = 64, o.V = 64; });
    add(20, [](Options& o) { o.K = 128, o.V = 64; });
    add(20, [](Options& o) { o.K = 64, o.V = 128, o.act_bf16 = false; });
  }
  for (const Options& o : all) {
    Case c(o);
    const auto exact = c.on_gpu(true), frozen = c.on_gpu(false);
    for (const auto& name : c.outputs())
      if (name != "out") EXPECT_TRUE(frozen.at(name) == exact.at(name)) << o.name() << " " << name;
    const Difference d = compare(c.b["out"], exact.at("out"), frozen.at("out"));
    if (o.act_bf16)
      EXPECT_TRUE(d.most <= 1 && d.changed <= 1e-3) << o.name() << " " << d.most << " " << d.changed;
    else
      EXPECT_LT(d.relative, 3e-6) << o.name();
    for (int i = 0; i < (gpu_test::small() ? 1 : 3); ++i) EXPECT_TRUE(c.on_gpu(false) == frozen) << o.name();
  }
  // A tree that only this form holds: its branches are chains.
  if (gpu_test::small()) return;
  Options o;
  o.lens = {64};
  for (int t = 0; t < 64; ++t) o.parents.push_back(t < 4 ? -1 : t - 4);  // four chains of 16, token by token
  Case c(o);
  const auto tree = c.on_gpu(false);
  Options chain = o;
  chain.parents.clear(), chain.lens = {16};
  const std::size_t bytes = static_cast<std::size_t>(c.HV * o.V * 2);
  for (std::size_t branch = 0; branch < 4; ++branch) {
    Case x(chain);
    for (const char* name : {"x_q", "x_k", "x_v", "g", "beta", "gate", "state", "w_q", "w_k", "w_v", "cs_q", "cs_k", "cs_v", "A_log",
                             "dt_bias", "weight", "slots"}) {
      Buffer &from = c.b[name], &to = x.b[name];
      const std::size_t pitch = static_cast<std::size_t>(from.shape.strides[0] * size_of(from.shape.dtype));
      if (from.shape.sizes[0] != 64) {
        to.host = from.host;
      } else {
        for (std::size_t i = 0; i < 16; ++i)
          std::memcpy(to.host.data() + i * pitch, from.host.data() + (4 * i + branch) * pitch,
                      std::min({pitch, to.host.size() - i * pitch, from.host.size() - (4 * i + branch) * pitch}));
      }
      to.upload();
    }
    const auto got = x.on_gpu(true).at("out");
    std::vector<unsigned char> mine;
    for (std::size_t i = 0; i < 16; ++i)
      mine.insert(mine.end(), tree.at("out").begin() + static_cast<std::ptrdiff_t>((4 * i + branch) * bytes),
                  tree.at("out").begin() + static_cast<std::ptrdiff_t>((4 * i + branch + 1) * bytes));
    const Difference d = compare(x.b["out"], got, mine);
    EXPECT_TRUE(d.most <= 1 && d.changed <= 1e-3) << branch << " " << d.most << " " << d.changed;
  }
  // A parent behind its child: padding.
  reinterpret_cast<std::int32_t*>(c.b["parents"].host.data())[7] = 9, c.b["parents"].upload();
  const auto nothing = c.on_gpu(false);
  for (unsigned char byte : nothing.at("out")) ASSERT_EQ(byte, 0);
}

constexpr const char* kPerToken[] = {"x_q", "x_k", "x_v", "g", "beta", "gate"};

/// Speculation for 1000 rounds of random acceptance leaves the outputs, states and windows of plain decoding, bit for bit; also where folds are
/// deferred, whichever form verifies. The faster form's outputs are those of the recurrence within a unit of bfloat16, in a thousandth of them.
TEST_F(KdaGpu, RolloutOfRandomAcceptanceIsPlainDecoding) {
  Options o;
  o.lens = {8, 8, 8};
  constexpr std::int64_t W = 8;
  const std::int64_t chunk = gpu_test::small() ? 2 : 50, chunks = gpu_test::small() ? 1 : 20;  // rounds that need no word from the GPU
  Case spec(o), plain(o), deferred(o);
  const std::int64_t N = spec.N, T = spec.T;
  deferred.indices("pending", DType::kInt32, std::vector<std::int64_t>(static_cast<std::size_t>(deferred.pool), 0));
  // Of a chunk's rounds: what is proposed, what of it is accepted (request after request), the outputs.
  std::map<std::string, Buffer> proposed, accepted, outputs, counts;
  for (const char* name : kPerToken) {
    const TensorView& one = spec.b[name].shape;
    for (auto* of : {&proposed, &accepted}) {
      Buffer& x = (*of)[name];
      if (one.ndim == 3)
        x.make(one.dtype, {chunk * T, one.sizes[1], one.sizes[2]}, one.strides[0]);
      else
        x.make(one.dtype, {chunk * T, one.sizes[1]}, one.strides[0]);
    }
  }
  for (const char* name : {"exact", "fast", "deferred", "plain"}) outputs[name].make(DType::kBFloat16, {chunk * T, spec.HV, o.V});
  for (const char* name : {"accept", "last", "cu"}) counts[name].make(DType::kInt32, {chunk * (N + 1)});
  const auto number = [&](const char* name, std::int64_t round, std::int64_t r) -> std::int32_t& {
    return reinterpret_cast<std::int32_t*>(counts[name].host.data())[round * (N + 1) + r];
  };
  const auto of_round = [&](const Buffer& x, std::int64_t round) {
    TensorView t = x.view(true);
    t.data = static_cast<char*>(t.data) + round * T * t.strides[0] * size_of(t.dtype), t.sizes[0] = T;
    return t;
  };
  const auto numbers_of_round = [&](const char* name, std::int64_t round, std::int64_t n) {
    TensorView t = counts[name].view(true);
    t.data = static_cast<char*>(t.data) + round * (N + 1) * 4, t.sizes[0] = n;
    return t;
  };
  const auto inputs = [&](StepParams& p, const std::map<std::string, Buffer>& of, std::int64_t round, const char* output) {
    p.x_q = of_round(of.at("x_q"), round), p.x_k = of_round(of.at("x_k"), round), p.x_v = of_round(of.at("x_v"), round);
    p.g = of_round(of.at("g"), round), p.beta = of_round(of.at("beta"), round), p.onorm_gate = of_round(of.at("gate"), round);
    p.out = of_round(outputs.at(output), round);
  };
  const auto commit_windows = [&](Case& c, std::int64_t round) {
    RollbackConvWindowsParams back[3];
    for (int i = 0; i < 3; ++i) {
      back[i].pool = c.b[i == 0 ? "cs_q" : i == 1 ? "cs_k" : "cs_v"].view(true);
      back[i].windows = c.b[i == 0 ? "conv_q" : i == 1 ? "conv_k" : "conv_v"].view(true);
      back[i].slots = c.b["slots"].view(true), back[i].last_correct_step = numbers_of_round("last", round, N);
      back[i].rows = c.b["rows"].view(true);
    }
    rollback_conv_windows(back, 3);
  };
  std::mt19937 rng(7);
  double off = 0, values = 0;
  for (std::int64_t part = 0; part < chunks; ++part) {
    for (std::int64_t round = 0; round < chunk; ++round) {
      number("cu", round, 0) = 0;
      for (std::int64_t r = 0; r < N; ++r) {
        number("accept", round, r) = static_cast<std::int32_t>(rng() % 9);
        number("last", round, r) = number("accept", round, r) - 1;
        number("cu", round, r + 1) = number("cu", round, r) + number("accept", round, r);
      }
    }
    std::vector<Buffer*> all;
    for (const char* name : kPerToken) {
      Buffer &x = proposed[name], &y = accepted[name];
      for (std::size_t i = 0; i < x.count(); ++i) x.set(i, static_cast<float>(static_cast<int>(rng() >> 8) - (1 << 23)) * 0x1p-22f);
      const std::size_t pitch = static_cast<std::size_t>(x.shape.strides[0] * size_of(x.shape.dtype));
      for (std::int64_t round = 0; round < chunk; ++round)
        for (std::int64_t r = 0; r < N; ++r)
          for (std::int64_t i = 0; i < number("accept", round, r); ++i) {
            const std::size_t from = static_cast<std::size_t>(round * T + r * W + i) * pitch,
                              to = static_cast<std::size_t>(round * T + number("cu", round, r) + i) * pitch;
            std::memcpy(y.host.data() + to, x.host.data() + from, std::min({pitch, x.host.size() - from, y.host.size() - to}));
          }
      all.push_back(&x), all.push_back(&y);
    }
    for (auto& [name, x] : counts) all.push_back(&x);
    for (Buffer* x : all) x->upload();
    for (std::int64_t round = 0; round < chunk; ++round) {
      auto p = spec.verify_params(true);
      inputs(p, proposed, round, "exact"), p.exact = true;
      verify(p);
      inputs(p, proposed, round, "fast"), p.exact = false;
      verify(p);
      FoldParams f;
      f.state = spec.b["state"].view(true), f.rings = spec.ring_views(true), f.slots = spec.b["slots"].view(true);
      f.accept = numbers_of_round("accept", round, N);
      fold(f);
      commit_windows(spec, round);

      p = deferred.verify_params(true);
      inputs(p, proposed, round, "deferred"), p.exact = round % 2 == 0, p.pending = deferred.b["pending"].view(true);
      verify(p);
      DeferFoldParams later;
      later.pending = p.pending, later.slots = p.slots, later.accept = f.accept;
      defer_fold(later);
      commit_windows(deferred, round);

      auto d = plain.step<DecodeParams>(true);
      inputs(d, accepted, round, "plain"), d.cu_seqlens = numbers_of_round("cu", round, N + 1);
      decode(d);
    }
    SPECSTATE_GPU(cudaDeviceSynchronize());
    for (auto& [name, x] : outputs) x.download();
    const std::vector<unsigned char>&exact = outputs["exact"].host, &fast = outputs["fast"].host, &later = outputs["deferred"].host,
                               &decoded = outputs["plain"].host;
    const std::size_t token = static_cast<std::size_t>(spec.HV * o.V * 2);
    float largest = 0;
    for (std::size_t i = 0; i < outputs["exact"].count(); ++i) largest = std::max(largest, std::abs(outputs["exact"].at(i)));
    for (std::size_t i = 0; i < outputs["exact"].count(); ++i) {
      const float x = outputs["exact"].at(i), y = outputs["fast"].at(i);
      // where terms cancelled, a bfloat16 is finer than what they were summed in
      ASSERT_TRUE(x == y || ulps(outputs["exact"], exact, fast, i) <= 1 || std::abs(x - y) <= 1e-5f * largest) << x << " " << y;
      off += x != y, ++values;
    }
    for (std::int64_t round = 0; round < chunk; ++round) {
      const std::size_t begin = static_cast<std::size_t>(round * T) * token;
      ASSERT_EQ(std::memcmp(later.data() + begin, (round % 2 == 0 ? exact : fast).data() + begin, static_cast<std::size_t>(T) * token), 0)
          << part << " " << round;
      for (std::int64_t r = 0; r < N; ++r)
        ASSERT_EQ(std::memcmp(exact.data() + begin + static_cast<std::size_t>(r * W) * token,
                              decoded.data() + begin + static_cast<std::size_t>(number("cu", round, r)) * token,
                              static_cast<std::size_t>(number("accept", round, r)) * token),
                  0)
            << "round " << part * chunk + round << " request " << r;
    }
  }
  std::printf("rollout: %.2e of the outputs of the faster form differ\n", off / values);
  EXPECT_LE(off, 1e-3 * values);
  const auto want = plain.taken({"state", "cs_q", "cs_k", "cs_v"});
  EXPECT_TRUE(spec.taken({"state", "cs_q", "cs_k", "cs_v"}) == want);
  FoldParams flush;
  flush.state = deferred.b["state"].view(true), flush.rings = deferred.ring_views(true), flush.slots = deferred.b["slots"].view(true);
  flush.pending = deferred.b["pending"].view(true);
  fold(flush);
  EXPECT_TRUE(deferred.taken({"state", "cs_q", "cs_k", "cs_v"}) == want);
  EXPECT_TRUE(deferred.settled());
}

/// Pools of many layers: alike ones (more than one launch takes), others of other dtypes and layouts between them, against the CPU.
TEST_F(KdaGpu, WindowsOfManyPools) {
  const int count = gpu_test::small() ? 7 : 4 * kda::cuda::RollbackPools::kMost + 5;
  constexpr std::int64_t kPool = 5, kRows = 3, kSteps = 3, kRequests = 3;
  std::vector<std::unique_ptr<Buffer>> pools, windows;
  std::mt19937 rng(3);
  for (int i = 0; i < count; ++i) {
    const int kind = i % 2 == 0 && i < 80 ? i / 2 : 0;  // most are alike
    const DType dtype = kind % 4 == 1 ? DType::kFloat32 : DType::kBFloat16;
    const std::int64_t C = kind % 7 == 3 ? 38 : 36;
    pools.push_back(std::make_unique<Buffer>()), windows.push_back(std::make_unique<Buffer>());
    pools.back()->make(dtype, {kPool, 3, C}, kind % 5 == 2 ? 3 * C + 16 : 0);
    Buffer& w = *windows.back();
    w.make(dtype, {kRows, kSteps, 3, C});
    for (std::size_t k = 0; k < w.count(); ++k) w.set(k, static_cast<float>(static_cast<int>(rng() >> 8) - (1 << 23)) * 0x1p-22f);
    w.upload();
  }
  std::map<std::string, Buffer> indices;
  const std::map<std::string, std::vector<std::int32_t>> values = {
      {"slots", {4, -1, 2}}, {"last", {2, 0, 1}}, {"rows", {1, 0, 2}}, {"track", {0, -1, 1}}, {"track_steps", {0, -1, 2}}};
  for (const auto& [name, x] : values) {
    indices[name].make(DType::kInt32, {kRequests});
    std::memcpy(indices[name].host.data(), x.data(), x.size() * 4);
    indices[name].upload();
  }
  const auto taps_last = [](TensorView t, int d) {  // [.., 3, C] seen as [.., C, 3]
    std::swap(t.sizes[d], t.sizes[d + 1]), std::swap(t.strides[d], t.strides[d + 1]);
    return t;
  };
  for (bool tracks : {false, true}) {
    for (auto& p : pools) p->poison();
    for (bool gpu : {false, true}) {
      std::vector<RollbackConvWindowsParams> all(static_cast<std::size_t>(count));
      for (int i = 0; i < count; ++i) {
        RollbackConvWindowsParams& p = all[static_cast<std::size_t>(i)];
        p.pool = taps_last(pools[static_cast<std::size_t>(i)]->view(gpu), 1);
        p.windows = taps_last(windows[static_cast<std::size_t>(i)]->view(gpu), 2);
        p.slots = indices["slots"].view(gpu), p.last_correct_step = indices["last"].view(gpu);
        if (i % 64 != 4) p.rows = indices["rows"].view(gpu);  // some by their own numbers
        if (tracks) p.track_slots = indices["track"].view(gpu), p.track_steps = indices["track_steps"].view(gpu);
      }
      rollback_conv_windows(all.data(), count);
    }
    for (int i = 0; i < count; ++i) {
      Buffer& p = *pools[static_cast<std::size_t>(i)];
      const std::vector<unsigned char> want = p.host;
      p.download();
      EXPECT_TRUE(p.host == want) << "pool " << i << " tracks " << tracks;
      EXPECT_TRUE(std::any_of(want.begin(), want.end(), [](unsigned char x) { return x != 0xFF; }));
    }
  }
}

/// More requests than a dimension of a grid has blocks, most of them padding: the windows of the last ones move, too, and nothing is half done.
TEST_F(KdaGpu, MoreRequestsThanADimensionOfBlocks) {
  if (gpu_test::small()) return;
  constexpr std::int64_t kRequests = 66000, kReal[3] = {3, 65535, kRequests - 1};
  std::vector<std::int64_t> slots(kRequests, -1), last(kRequests, 0), rows(kRequests, 0), cu(kRequests + 1, 0);
  for (std::int64_t i = 0; i < 3; ++i) slots[kReal[i]] = 3 - i, last[kReal[i]] = i % 2, rows[kReal[i]] = i;
  for (std::int64_t r = 0; r < kRequests; ++r) cu[r + 1] = cu[r] + (slots[r] >= 0);
  Options o;
  o.H = 1, o.K = o.V = 64, o.lens = {1, 1, 1}, o.rings = false;
  Case c(o);
  c.indices("slots", DType::kInt32, slots), c.indices("last", DType::kInt32, last), c.indices("many", DType::kInt32, rows);
  c.indices("cu", DType::kInt32, cu);
  Buffer windows;
  windows.make(DType::kBFloat16, {3, 2, 64, 3});
  for (std::size_t i = 0; i < windows.count(); ++i) windows.set(i, static_cast<float>(i % 251));
  windows.upload();
  for (const bool whole : {false, true}) {  // without rows request n's are row n's
    RollbackConvWindowsParams p[2];
    for (const bool gpu : {true, false}) {
      RollbackConvWindowsParams& x = p[gpu];
      x.pool = c.b["cs_k"].view(gpu), x.windows = windows.view(gpu), x.slots = c.b["slots"].view(gpu);
      x.last_correct_step = c.b["last"].view(gpu);
      if (whole)
        x.windows.sizes[0] = kRequests, x.windows.strides[0] = 0;
      else
        x.rows = c.b["many"].view(gpu);
      rollback_conv_windows(&x, 1);
    }
    const std::vector<unsigned char> want = c.b["cs_k"].host;
    EXPECT_TRUE(c.taken({"cs_k"}).at("cs_k") == want) << whole;
  }
  decode(c.step<DecodeParams>(true));
  decode(c.step<DecodeParams>(false));
  std::map<std::string, std::vector<unsigned char>> want;
  const std::vector<std::string> names = {"cs_q", "cs_k", "cs_v", "state", "out"};
  for (const auto& name : names) want[name] = c.b[name].host;
  const auto got = c.taken(names);
  for (const auto& name : {"cs_q", "cs_k", "cs_v"}) EXPECT_TRUE(got.at(name) == want.at(name)) << name;
  for (const auto& name : {"state", "out"}) EXPECT_LT(compare(c.b[name], got.at(name), want.at(name)).relative, 1e-2) << name;
}

/// A verify with pending tokens is a fold and a verify, in every form: outputs, records, windows, snapshots and states.
TEST_F(KdaGpu, DeferredFoldIsAFoldBefore) {
  for (Options o : cases())
    for (bool snapshots : {false, true})
      for (bool exact : {true, false}) {
        if (snapshots && (!exact || o.seed % 4)) continue;  // snapshots are exact
        o.snapshots = snapshots;
        Case c(o), d(o);
        c.on_gpu(true);
        std::vector<std::int64_t> accept, pending(static_cast<std::size_t>(c.pool), 0);
        std::mt19937 rng(o.seed);
        for (std::int64_t r = 0; r < c.N; ++r) {
          const int len = o.lens[static_cast<std::size_t>(r)];
          accept.push_back(len ? static_cast<std::int64_t>(rng()) % (len + 1) : 0);
          if (c.slot(r) >= 0) pending[static_cast<std::size_t>(c.slot(r))] = accept.back();
        }
        const std::vector<const char*> kept = {"rawv", "rawk", "ring_g", "ring_beta", "state"};
        std::map<std::string, std::vector<unsigned char>> before;
        for (const char* name : kept) c.b[name].download(), before[name] = c.b[name].host;
        c.indices("accept", DType::kInt32, accept);
        FoldParams f;
        f.state = c.b["state"].view(true), f.rings = c.ring_views(true), f.slots = c.b["slots"].view(true),
        f.accept = c.b["accept"].view(true);
        fold(f);
        std::vector<std::string> names = c.outputs();
        names.push_back("state");
        const auto verified = [&](Case& x, bool deferred) {
          for (const char* name : {"out", "conv_q", "conv_k", "conv_v", "snapshots"})
            if (x.b.count(name)) x.b[name].poison_device();
          VerifyParams p = x.verify_params(true);
          p.exact = exact;
          if (deferred) p.pending = x.b["pending"].view(true);
          verify(p);
          return x.taken(names);
        };
        const auto want = verified(c, false);
        const bool cut = o.K == 128 && o.V == 128 && c.HV * c.N <= 64 && !gpu_test::small();
        const std::vector<int> cuts = cut ? std::vector{0, 8, 2, 3} : std::vector{0};
        for (int rows : cuts) {
          const Forcing forcing(rows == 3 ? 0 : rows, -1, -1, rows == 3 ? 3 : 0);  // 3: the fold inside third.cuh, where it applies
          for (const char* name : kept) d.b[name].host = before[name], d.b[name].upload();
          d.indices("pending", DType::kInt32, pending);
          const auto got = verified(d, true);
          for (const auto& name : names)
            EXPECT_TRUE(got.at(name) == want.at(name)) << o.name() << " " << name << " exact " << exact << " rows " << rows;
          EXPECT_TRUE(d.settled()) << o.name();
        }
      }
}

/// The deferred fold inside third.cuh is the one in front of it, bit for bit: everything that is written, and the counts. Ragged requests; counts
/// of 0 to all entries, of no entry at all (which stay), of requests without tokens, of padding and of slots that no request names.
TEST_F(KdaGpu, DeferredFoldInsideTheVerify) {
  struct Size {
    std::int64_t H;
    int requests, longest;
    bool wide, norm;
  };
  // A multiprocessor's first CTA alone, with a second, with a third, with more than fit at once; rings of fewer entries.
  std::vector<Size> sizes = {{12, 12, 8, false, true}, {12, 24, 8, true, true}, {12, 35, 8, false, false},
                             {16, 10, 5, false, true}, {16, 10, 4, true, true}, {7, 20, 1, false, true}};
  if (gpu_test::small()) sizes = {{1, 3, 8, false, true}, {2, 2, 3, true, true}};
  for (const Size& size : sizes)
    for (int round = 0; round < (gpu_test::small() ? 2 : 3); ++round) {
      Options o;
      o.seed = static_cast<unsigned>(round + 1), o.H = size.H, o.wide = size.wide, o.norm = size.norm, o.lens.clear();
      std::mt19937 rng(o.seed);
      for (int r = 0; r < size.requests; ++r)
        o.lens.push_back(round == 0                    ? size.longest
                         : static_cast<int>(rng()) & 1 ? size.longest
                                                       : static_cast<int>(rng() % (size.longest + 1u)));
      o.lens[0] = size.longest;
      if (round == 1) o.null_row = size.requests - 1;
      Case c(o);
      std::normal_distribution<float> normal;
      for (const char* name : {"rawv", "rawk", "ring_g", "ring_beta"}) {  // records of every slot, whatever its request's tokens
        Buffer& x = c.b[name];
        for (std::size_t i = 0; i < x.count(); ++i)
          x.set(i, name == std::string("ring_g") ? -0.2f * std::abs(normal(rng)) : 0.5f * normal(rng));
        x.upload();
      }
      std::vector<std::int64_t> counts(static_cast<std::size_t>(c.pool));
      for (auto& n : counts) n = static_cast<std::int64_t>(rng() % (size.longest + 1u));
      if (round < 2) counts[static_cast<std::size_t>(c.slot(0))] = size.longest;
      if (round == 0) counts[static_cast<std::size_t>(c.slot(1))] = 0;
      if (round == 2) counts[static_cast<std::size_t>(c.slot(0))] = size.longest + 1, counts[static_cast<std::size_t>(c.slot(1))] = -3;
      std::vector<std::string> names = c.outputs();
      names.insert(names.end(), {"state", "pending"});
      std::map<std::string, std::vector<unsigned char>> before, want;
      for (const char* name : {"rawv", "rawk", "ring_g", "ring_beta", "state"}) c.b[name].download(), before[name] = c.b[name].host;
      for (bool inside : {false, true}) {
        const Forcing forcing(0, -1, -1, 3);
        kda::cuda::forced().inside = inside;
        for (const auto& [name, bytes] : before) c.b[name].host = bytes, c.b[name].upload();
        for (const char* name : {"out", "conv_q", "conv_k", "conv_v"}) c.b[name].poison_device();
        c.indices("pending", DType::kInt32, counts);
        VerifyParams p = c.verify_params(true);
        p.pending = c.b["pending"].view(true);
        verify(p);
        auto got = c.taken(names);
        if (!inside) {
          want = std::move(got);
          EXPECT_FALSE(round < 2 && want.at("state") == before.at("state"));
          continue;
        }
        for (const auto& name : names) EXPECT_TRUE(got.at(name) == want.at(name)) << o.name() << " round " << round << " " << name;
        for (std::int64_t r = 0; r < c.N; ++r) {
          if (c.slot(r) < 0) continue;
          const std::int64_t was = counts[static_cast<std::size_t>(c.slot(r))];
          const bool stays = !o.lens[static_cast<std::size_t>(r)] || was < 0 || was > c.longest;
          EXPECT_EQ(reinterpret_cast<const std::int32_t*>(got.at("pending").data())[c.slot(r)], stays ? was : 0) << r;
        }
      }
    }
}

/// A request alone has the bits that it has among others, in calls that are cut otherwise.
TEST_F(KdaGpu, BitsDoNotDependOnTheOtherRequests) {
  Options o;
  o.H = 24, o.lens = {8, 3, 16, 8, 1, 18, 9, 8};  // 18: the others' lengths are not known to the host
  if (gpu_test::small()) o.H = 1, o.lens = {2, 16, 18};
  Case c(o);
  for (bool exact : {true, false}) {
    const auto all = c.on_gpu(exact);
    for (int warps : {8, 16}) {
      const Forcing forcing(0, -1, -1, warps);
      for (const auto& [name, bytes] : c.on_gpu(exact))
        EXPECT_TRUE(bytes == all.at(name)) << name << " exact " << exact << " warps " << warps;
    }
    for (const auto& name : c.outputs()) c.b[name].poison();
    std::int64_t begin = 0;
    for (std::int64_t r = 0; r < c.N; ++r) {
      const std::int64_t n = o.lens[static_cast<std::size_t>(r)];
      VerifyParams p = c.verify_params(true);
      p.exact = exact, p.cu_seqlens = {};
      for (TensorView* t : {&p.slots, &p.rows}) t->data = static_cast<char*>(t->data) + r * size_of(t->dtype), t->sizes[0] = 1;
      for (TensorView* t : {&p.x_q, &p.x_k, &p.x_v, &p.g, &p.beta, &p.onorm_gate, &p.out})
        t->data = static_cast<char*>(t->data) + begin * t->strides[0] * size_of(t->dtype), t->sizes[0] = n;
      verify(p);
      begin += n;
    }
    for (const auto& [name, bytes] : c.taken(c.outputs())) EXPECT_TRUE(bytes == all.at(name)) << name << " exact " << exact;
  }
}

/// All layers in one launch, as a stream and head by head, with tracks and more tokens than one block: a loop over the layers.
TEST_F(KdaGpu, FoldOfAllLayersIsALoopWithTracks) {
  for (bool state_bf16 : {false, true}) {
    if (gpu_test::small() && state_bf16) continue;
    const std::int64_t layers = gpu_test::small() ? 2 : 5;
    Options o;
    o.H = 8, o.state_bf16 = state_bf16, o.lens = {16, 9, 8, 3, 12, 1};
    if (gpu_test::small()) o.H = 12, o.lens = {12, 1, 3, 2, 1, 1};
    std::vector<Case*> each;
    std::vector<std::unique_ptr<Case>> keep;
    for (std::int64_t i = 0; i < layers; ++i) keep.push_back(std::make_unique<Case>(o)), each.push_back(keep.back().get());
    for (std::int64_t i = 1; i < layers; ++i) {  // other numbers in every layer
      Case& c = *each[static_cast<std::size_t>(i)];
      for (const char* name : {"x_k", "x_v", "g", "beta", "state"}) {
        Buffer& x = c.b[name];
        for (std::size_t e = 0; e < x.count(); ++e) x.set(e, x.at(e) * (1 + .1f * static_cast<float>(i)));
        x.upload();
      }
    }
    for (Case* c : each) c->on_gpu(true);
    std::vector<std::int64_t> accept = {16, 0, 8, 2, 11, 1};
    for (std::size_t r = 0; r < 6; ++r) accept[r] = std::min<std::int64_t>(accept[r], o.lens[r]);
    std::vector<std::int64_t> track(6, -1), step(6, 0), used(static_cast<std::size_t>(each[0]->pool), 0), counts(used);
    for (std::int64_t r = 0; r < 6; ++r) used[static_cast<std::size_t>(each[0]->slot(r))] = 1;
    std::vector<std::int64_t> spare;
    for (std::int64_t s = 0; s < each[0]->pool; ++s)
      if (!used[static_cast<std::size_t>(s)]) spare.push_back(s);
    track[0] = spare[0], step[0] = 9, track[2] = spare[1], step[2] = 8;  // the second is not accepted
    for (std::int64_t r = 0; r < 6; ++r) counts[static_cast<std::size_t>(each[0]->slot(r))] = accept[static_cast<std::size_t>(r)];
    // stacked: [layers, ...] of every tensor
    std::map<std::string, Buffer> all;
    const auto stack = [&](const char* name) {
      Buffer& x = all[name];
      const TensorView& one = each[0]->b[name].shape;
      const std::int64_t bytes = static_cast<std::int64_t>(each[0]->b[name].host.size()), pitch = bytes / size_of(one.dtype) + 64;
      x.host.assign(static_cast<std::size_t>((layers - 1) * pitch * size_of(one.dtype) + bytes), 0xFF);
      for (std::int64_t i = 0; i < layers; ++i)
        std::memcpy(x.host.data() + i * pitch * size_of(one.dtype), each[static_cast<std::size_t>(i)]->b[name].host.data(),
                    static_cast<std::size_t>(bytes));
      if (!x.device) x.device = Arena::get().take(x.host.size());
      x.upload();
      x.shape = one, x.shape.ndim = one.ndim + 1;
      for (int d = one.ndim; d > 0; --d) x.shape.sizes[d] = one.sizes[d - 1], x.shape.strides[d] = one.strides[d - 1];
      x.shape.sizes[0] = layers, x.shape.strides[0] = pitch;
    };
    for (Case* c : each)
      c->indices("accept", DType::kInt32, accept), c->indices("track", DType::kInt64, track), c->indices("track_step", DType::kInt32, step);
    for (const char* name : {"state", "rawv", "rawk", "ring_g", "ring_beta"}) stack(name);
    const std::vector<unsigned char> before = all["state"].host;
    for (Case* c : each) {
      const Forcing forcing(8);
      FoldParams f;
      f.state = c->b["state"].view(true), f.rings = c->ring_views(true), f.slots = c->b["slots"].view(true);
      f.accept = c->b["accept"].view(true), f.track = c->b["track"].view(true), f.track_step = c->b["track_step"].view(true);
      fold(f);
      c->taken({"state"});
    }
    stack("state");
    const std::vector<unsigned char> want = all["state"].host;
    EXPECT_NE(want, before);
    Case& c = *each[0];
    for (int rows : {0, 8, 4, 2})
      for (bool flush : {false, true}) {
        if (gpu_test::small() && (rows || flush)) continue;
        const Forcing forcing(rows);
        all["state"].host = before, all["state"].upload();
        FoldParams f;
        f.state = all["state"].view(true);
        f.rings = {all["rawv"].view(true), all["rawk"].view(true), all["ring_g"].view(true), all["ring_beta"].view(true)};
        f.slots = c.b["slots"].view(true), f.track = c.b["track"].view(true), f.track_step = c.b["track_step"].view(true);
        if (flush) {
          std::vector<std::int64_t> pending;
          for (std::int64_t i = 0; i < layers; ++i) pending.insert(pending.end(), counts.begin(), counts.end());
          c.indices("pending", DType::kInt32, pending);
          f.pending = c.b["pending"].view(true);
          f.pending.ndim = 2, f.pending.sizes[0] = layers, f.pending.sizes[1] = c.pool, f.pending.strides[0] = c.pool,
          f.pending.strides[1] = 1;
        } else {
          f.accept = c.b["accept"].view(true);
        }
        fold(f);
        SPECSTATE_GPU(cudaDeviceSynchronize());
        all["state"].download();
        EXPECT_TRUE(all["state"].host == want) << "rows " << rows << " flush " << flush << " bf16 " << state_bf16;
        EXPECT_TRUE(!flush || c.settled());
        if (rows || flush) continue;
        const gpu_test::OwnStream stream;
        EXPECT_EQ(gpu_test::Captured(stream, [&](Stream to) { fold(f, to); }).kernels(), 1u);
      }
  }
}

/// By plain calls and by replays of a graph.
TEST_F(KdaGpu, SameBitsInAHundredRuns) {
  Options o;
  o.lens = {8, 5, 8, 1};
  Case c(o);
  for (bool exact : {true, false}) {
    const auto first = c.on_gpu(exact);
    VerifyParams p = c.verify_params(true);
    p.exact = exact;
    const gpu_test::OwnStream stream;
    const gpu_test::Captured graph(stream, [&](Stream to) { verify(p, to); });
    for (int i = 0, runs = gpu_test::small() ? 1 : 100; i < runs; ++i) {
      ASSERT_EQ(c.on_gpu(exact), first) << i;
      for (const auto& name : c.outputs()) c.b[name].poison_device();
      ASSERT_TRUE(graph.replay());
      ASSERT_EQ(c.taken(c.outputs()), first) << "replay " << i;
    }
  }
}

/// A graph captured once serves other inputs: slots, lengths and padding are read on the device.
TEST_F(KdaGpu, GraphReplaysWithChangedInputs) {
  Options o;
  o.lens = {8, 8, 8, 8};
  for (bool exact : {true, false}) {
    Case c(o);
    VerifyParams p = c.verify_params(true);
    p.exact = exact;
    c.indices("accept", DType::kInt32, {1, 1, 1, 1});
    FoldParams f;
    f.state = c.b["state"].view(true), f.rings = c.ring_views(true), f.slots = c.b["slots"].view(true), f.accept = c.b["accept"].view(true);
    cudaStream_t s;
    cudaGraph_t graph;
    cudaGraphExec_t exec;
    SPECSTATE_GPU(cudaStreamCreate(&s));
    SPECSTATE_GPU(cudaStreamBeginCapture(s, cudaStreamCaptureModeGlobal));
    verify(p, {s});
    fold(f, {s});
    SPECSTATE_GPU(cudaStreamEndCapture(s, &graph));
    SPECSTATE_GPU(cudaGraphInstantiate(&exec, graph, 0));
    std::mt19937 rng(3);
    for (int real : {4, 3, 1, 4, 0, 2}) {
      if (gpu_test::small() && real != 3 && real != 0) continue;
      // `real` requests, the rest padding; lengths of the real ones vary
      std::vector<std::int64_t> slots, cu = {0}, accept;
      for (int r = 0; r < 4; ++r) {
        slots.push_back(r < real ? (r * 5 + real) % c.pool : -1);
        cu.push_back(cu.back() + (r < real ? 1 + static_cast<std::int64_t>(rng() % 8) : 0));
        accept.push_back(cu[static_cast<std::size_t>(r) + 1] - cu[static_cast<std::size_t>(r)]);
      }
      const auto put = [&](const char* name, const std::vector<std::int64_t>& v) {
        for (std::size_t i = 0; i < v.size(); ++i)
          reinterpret_cast<std::int32_t*>(c.b[name].host.data())[i] = static_cast<std::int32_t>(v[i]);
        c.b[name].upload();
      };
      put("slots", slots), put("cu", cu), put("accept", accept);
      for (const char* name : kPerToken) {
        Buffer& x = c.b[name];
        for (std::size_t i = 0; i < x.count(); ++i) x.set(i, static_cast<float>(static_cast<int>(rng() >> 8) - (1 << 23)) * 0x1p-22f);
        x.upload();
      }
      const std::vector<unsigned char> before = c.b["state"].host;
      c.b["state"].upload();
      auto names = c.outputs();
      for (const auto& name : names) c.b[name].poison();
      SPECSTATE_GPU(cudaDeviceSynchronize());
      SPECSTATE_GPU(cudaGraphLaunch(exec, s));
      names.push_back("state");
      const auto replayed = c.taken(names);
      c.b["state"].host = before, c.b["state"].upload();
      for (const auto& name : c.outputs()) c.b[name].poison();
      verify(p);
      fold(f);
      EXPECT_EQ(c.taken(names), replayed) << real;
      for (std::int64_t t = cu.back(); t < c.T; ++t)
        for (std::int64_t i = 0; i < c.HV * o.V; ++i) ASSERT_EQ(c.b["out"].at(static_cast<std::size_t>(t * c.HV * o.V + i)), 0.0f) << t;
      c.b["state"].host = before;
    }
    cudaGraphExecDestroy(exec), cudaGraphDestroy(graph), cudaStreamDestroy(s);
  }
}

/// Steps of a deferred fold as replays of one graph, with other tokens and accepted lengths each time, are those of plain calls with folds.
TEST_F(KdaGpu, DeferredStepsInAGraph) {
  Options o;
  o.lens = {8, 8, 8, 8};
  for (int form : {0, 1, 2}) {  // exact; frozen; the fold inside the verify
    const bool exact = form == 0;
    const Forcing forcing(0, -1, -1, form == 2 ? 3 : 0);
    Case graphed(o), plain(o);
    graphed.indices("pending", DType::kInt32, std::vector<std::int64_t>(static_cast<std::size_t>(graphed.pool), 0));
    for (Case* c : {&graphed, &plain}) c->indices("accept", DType::kInt32, {0, 0, 0, 0});
    VerifyParams p = graphed.verify_params(true);
    p.exact = exact, p.pending = graphed.b["pending"].view(true);
    DeferFoldParams later;
    later.pending = p.pending, later.slots = p.slots, later.accept = graphed.b["accept"].view(true);
    cudaStream_t s;
    cudaGraph_t graph;
    cudaGraphExec_t exec;
    SPECSTATE_GPU(cudaStreamCreate(&s));
    SPECSTATE_GPU(cudaStreamBeginCapture(s, cudaStreamCaptureModeGlobal));
    verify(p, {s});
    defer_fold(later, {s});
    SPECSTATE_GPU(cudaStreamEndCapture(s, &graph));
    SPECSTATE_GPU(cudaGraphInstantiate(&exec, graph, 0));
    std::mt19937 rng(5);
    for (int step = 0; step < (gpu_test::small() ? 2 : 8); ++step) {
      for (const char* name : kPerToken) {
        Buffer& x = plain.b[name];
        for (std::size_t i = 0; i < x.count(); ++i) x.set(i, static_cast<float>(static_cast<int>(rng() >> 8) - (1 << 23)) * 0x1p-22f);
        x.upload(), graphed.b[name].host = x.host, graphed.b[name].upload();
      }
      for (int r = 0; r < 4; ++r) reinterpret_cast<std::int32_t*>(plain.b["accept"].host.data())[r] = static_cast<std::int32_t>(rng() % 9);
      graphed.b["accept"].host = plain.b["accept"].host;
      for (Case* c : {&graphed, &plain}) c->b["accept"].upload();
      SPECSTATE_GPU(cudaDeviceSynchronize());
      SPECSTATE_GPU(cudaGraphLaunch(exec, s));
      VerifyParams q = plain.verify_params(true);
      q.exact = exact;
      verify(q);
      const auto want = plain.taken({"out", "rawk", "ring_g"});
      EXPECT_EQ(graphed.taken({"out", "rawk", "ring_g"}), want) << step;
      FoldParams f;
      f.state = plain.b["state"].view(true), f.rings = plain.ring_views(true), f.slots = plain.b["slots"].view(true);
      f.accept = plain.b["accept"].view(true);
      fold(f);
    }
    FoldParams flush;
    flush.state = graphed.b["state"].view(true), flush.rings = graphed.ring_views(true), flush.slots = graphed.b["slots"].view(true);
    flush.pending = p.pending;
    fold(flush);
    EXPECT_EQ(graphed.taken({"state"}), plain.taken({"state"}));
    EXPECT_TRUE(graphed.settled());
    cudaGraphExecDestroy(exec), cudaGraphDestroy(graph), cudaStreamDestroy(s);
  }
}

/// Pools whose slots lie 2^30 elements apart, so that products of a slot and its pitch pass 2^31: each tensor in turn.
TEST_F(KdaGpu, SlotsBeyondTwoToThe31) {
  Options o;
  o.lens = {8, 3};
  Case c(o);
  const auto want = c.on_gpu(true);
  c.indices("accept", DType::kInt32, {2, 3});
  const std::vector<unsigned char> before = c.b["state"].host;
  const auto folded = [&] {
    FoldParams f;
    f.state = c.b["state"].view(true), f.rings = c.ring_views(true), f.slots = c.b["slots"].view(true), f.accept = c.b["accept"].view(true);
    fold(f);
    SPECSTATE_GPU(cudaDeviceSynchronize());
  };
  if (gpu_test::small()) return;  // 13 GB are too much for a tool that watches every byte
  folded();
  const auto committed = c.taken({"state"}).at("state");
  const std::int64_t pitch = (std::int64_t{1} << 30) + 1024;
  unsigned char* far = nullptr;
  if (cudaMalloc(&far, static_cast<std::size_t>((c.pool - 1) * pitch + c.HV * o.V * o.K) * 4) != cudaSuccess) {
    cudaGetLastError();
    GTEST_SKIP() << "needs-memory: 13 GB on the GPU";
  }
  for (const char* name : {"state", "rawv", "rawk", "ring_g", "ring_beta", "cs_q", "cs_k", "cs_v", "conv_q", "conv_k", "conv_v"}) {
    c.b["state"].host = before, c.b["state"].upload();
    for (const auto& output : c.outputs()) c.b[output].poison();
    Buffer& x = c.b[name];
    unsigned char* const near = x.device;
    const std::int64_t size = size_of(x.shape.dtype), own = x.shape.strides[0];
    std::int64_t row = 1;
    for (int d = 1; d < x.shape.ndim; ++d) row += (x.shape.sizes[d] - 1) * x.shape.strides[d];
    const auto move = [&](bool out) {
      for (std::int64_t i = 0; i < x.shape.sizes[0]; ++i)
        ASSERT_EQ(cudaMemcpy(out ? far + i * pitch * size : near + i * own * size, out ? near + i * own * size : far + i * pitch * size,
                             static_cast<std::size_t>(row * size), cudaMemcpyDeviceToDevice),
                  cudaSuccess);
    };
    move(true);
    x.device = far, x.shape.strides[0] = pitch;
    VerifyParams p = c.verify_params(true);
    p.exact = true;
    verify(p);
    folded();
    x.device = near, x.shape.strides[0] = own;
    move(false);
    auto names = c.outputs();
    names.push_back("state");
    const auto got = c.taken(names);
    for (const auto& output : c.outputs()) EXPECT_TRUE(got.at(output) == want.at(output)) << output << " with far " << name;
    EXPECT_TRUE(got.at("state") == committed) << "state with far " << name;
  }
  cudaFree(far);
}

/// What only the indices' contents can tell: such rows count as padding, nothing outside is touched.
TEST_F(KdaGpu, BadIndicesArePadding) {
  Options o;
  o.lens = {4, 4, 4, 4};
  Case c(o);
  const auto good = c.on_gpu(true);
  const std::vector<std::int64_t> slots = {c.slot(0), c.pool + 5, -7, c.slot(3)}, rows = {c.row(0), c.row(1), c.row(2), 99};
  c.indices("slots", DType::kInt32, slots), c.indices("rows", DType::kInt32, rows);
  const auto bad = c.on_gpu(true);
  const std::size_t bytes = static_cast<std::size_t>(4 * c.HV * o.V * 2);
  EXPECT_EQ(std::memcmp(bad.at("out").data(), good.at("out").data(), bytes), 0);
  for (std::size_t i = bytes; i < bad.at("out").size(); ++i) ASSERT_EQ(bad.at("out")[i], 0) << i;
  c.indices("cu", DType::kInt32, {0, 4, 2, 2, 1 << 20});  // falls; ends outside
  const auto worse = c.on_gpu(true);
  EXPECT_EQ(std::memcmp(worse.at("out").data(), good.at("out").data(), bytes), 0);
}

}  // namespace
