// KDA on the GPU: verify in both modes, fold and decode, with convolution, safe gate and output norm, bfloat16 activations, head dims of 128.
#include "specstate/kda.hpp"

#include <algorithm>
#include <string>
#include <vector>

#include "bench/gpu/gpu.hpp"

namespace specstate::bench {

namespace {

constexpr std::int64_t kDim = 128, kStateBytes = 4 * kDim * kDim;

struct Shape {
  std::int64_t heads, requests, tokens;
  bool all = true;  // with floors, snapshots and folds; otherwise ring mode alone
};

/// One layer's tensors. Channels of a window are contiguous, as an engine's pool has them.
struct Layer {
  std::int64_t H, N, W, T;
  GpuArray q, k, v, g, gate, out, cs, windows, rawv, rawk, beta, w, a_log, bias, weight, state, ring_g, ring_beta, slots, cu;

  static GpuArray numbers(std::int64_t n, bool bf16) {
    GpuArray a(static_cast<std::size_t>(n * (bf16 ? 2 : 4)));
    if (bf16)
      a.fill_bfloat16(1, static_cast<unsigned>(n));
    else
      a.fill_float32(1, static_cast<unsigned>(n));
    return a;
  }
  static GpuArray indices(const std::vector<std::int32_t>& values) {
    GpuArray a(values.size() * 4);
    a.set(values);
    return a;
  }
  static std::vector<std::int32_t> steps(std::int64_t n, std::int64_t step) {
    std::vector<std::int32_t> x(static_cast<std::size_t>(n));
    for (std::int64_t i = 0; i < n; ++i) x[static_cast<std::size_t>(i)] = static_cast<std::int32_t>(i * step);
    return x;
  }

  explicit Layer(const Shape& s)
      : H(s.heads),
        N(s.requests),
        W(s.tokens),
        T(s.requests * s.tokens),
        q(numbers(T * H * kDim, true)),
        k(numbers(T * H * kDim, true)),
        v(numbers(T * H * kDim, true)),
        g(numbers(T * H * kDim, true)),
        gate(numbers(T * H * kDim, true)),
        out(numbers(T * H * kDim, true)),
        cs(numbers(3 * N * H * kDim * 3, true)),
        windows(numbers(3 * T * H * kDim * 3, true)),
        rawv(numbers(N * H * W * kDim, true)),
        rawk(numbers(N * H * W * kDim, true)),
        beta(numbers(T * H, true)),
        w(numbers(H * kDim * 4, false)),
        a_log(numbers(H, false)),
        bias(numbers(H * kDim, false)),
        weight(numbers(kDim, false)),
        state(numbers(N * H * kDim * kDim, false)),
        ring_g(numbers(N * H * W * kDim, false)),
        ring_beta(numbers(N * H * W, false)),
        slots(indices(steps(N, 1))),
        cu(indices(steps(N + 1, W))) {}

  /// Window tensor `which` of q, k, v: [leading..., channels, 3], channels contiguous.
  TensorView window(const GpuArray& of, std::initializer_list<std::int64_t> leading, int which) const {
    std::int64_t rows = 1;
    for (const std::int64_t n : leading) rows *= n;
    TensorView t = of.view(DType::kBFloat16, {rows, 3, 3 * H * kDim});
    t.data = static_cast<char*>(t.data) + which * H * kDim * 2;
    TensorView r;
    r.data = t.data, r.dtype = t.dtype, r.device = t.device, r.ndim = static_cast<std::int32_t>(leading.size()) + 2;
    std::int64_t pitch = 9 * H * kDim;
    int d = static_cast<int>(leading.size());
    for (auto n = leading.end(); n != leading.begin();) {
      r.sizes[--d] = *--n;
      r.strides[d] = pitch;
      pitch *= *n;
    }
    d = static_cast<int>(leading.size());
    r.sizes[d] = H * kDim, r.strides[d] = 1, r.sizes[d + 1] = 3, r.strides[d + 1] = 3 * H * kDim;
    return r;
  }
  template <class Params>
  Params step() const {
    const auto act = [&](const GpuArray& a) { return a.view(DType::kBFloat16, {T, H, kDim}); };
    Params p;
    p.x_q = act(q), p.x_k = act(k), p.x_v = act(v);
    p.w_q = p.w_k = p.w_v = w.view(DType::kFloat32, {H * kDim, 4});
    p.cs_q = window(cs, {N}, 0), p.cs_k = window(cs, {N}, 1), p.cs_v = window(cs, {N}, 2);
    p.g = act(g), p.beta = beta.view(DType::kBFloat16, {T, H}), p.A_log = a_log.view(DType::kFloat32, {H});
    p.dt_bias = bias.view(DType::kFloat32, {H, kDim}), p.state = state.view(DType::kFloat32, {N, H, kDim, kDim});
    p.slots = slots.view(DType::kInt32, {N}), p.cu_seqlens = cu.view(DType::kInt32, {N + 1});
    p.onorm_gate = act(gate), p.onorm_weight = weight.view(DType::kFloat32, {kDim}), p.onorm_eps = 1e-5;
    p.out = act(out), p.lower_bound = -5.0;
    return p;
  }
  kda::Rings rings() const {
    return {rawv.view(DType::kBFloat16, {N, H, W, kDim}), rawk.view(DType::kBFloat16, {N, H, W, kDim}),
            ring_g.view(DType::kFloat32, {N, H, W, kDim}), ring_beta.view(DType::kFloat32, {N, H, W})};
  }
  kda::VerifyParams verify() const {
    auto p = step<kda::VerifyParams>();
    p.conv_q = window(windows, {N, W}, 0), p.conv_k = window(windows, {N, W}, 1), p.conv_v = window(windows, {N, W}, 2);
    return p;
  }
};

// Bytes a token and head moves besides states: q, k, v, g, the norm's gate, beta; out and the three windows; a ring's record.
constexpr std::int64_t kRead = 5 * kDim * 2 + 2, kWritten = kDim * 2 + 9 * kDim * 2, kRecord = 2 * kDim * 2 + kDim * 4 + 4,
                       kWindow = 9 * kDim * 2;

void measure(Report& report, Gpu& gpu, const Shape& shape) {
  const Layer x(shape);
  const std::int64_t items = x.N * x.H, tokens = items * x.W;
  const Report::Keys keys = {{"heads", std::to_string(x.H)}, {"requests", std::to_string(x.N)}, {"tokens", std::to_string(x.W)}};
  Result r;

  kda::VerifyParams ring = x.verify();
  ring.rings = x.rings();
  r.ours_us = gpu.cold_us([&](Stream s, int) { kda::verify(ring, s); }, {}, shape.all ? 21 : 7);
  if (shape.all || shape.tokens == 8) {  // a floor takes longer than what it is for
    r.floor = "reading and writing as many bytes, measured";
    r.floor_us = gpu.stream_us(items * (kStateBytes + kWindow) + tokens * kRead, tokens * (kWritten + kRecord));
  }
  report.add("verify_ring", keys, r);
  if (!shape.all) return;

  if (const std::int64_t bytes = tokens * kStateBytes; bytes < (std::int64_t{12} << 30)) {
    const GpuArray snapshots(static_cast<std::size_t>(bytes));
    kda::VerifyParams snap = x.verify();
    snap.snapshots = snapshots.view(DType::kFloat32, {x.N, x.W, x.H, kDim, kDim});
    r.ours_us = gpu.cold_us([&](Stream s, int) { kda::verify(snap, s); });
    r.floor_us = gpu.stream_us(items * (kStateBytes + kWindow) + tokens * kRead, tokens * (kWritten + kStateBytes));
    report.add("verify_snapshot", keys, r);
  }

  if (x.W < 4) return;
  const std::int64_t accepted = x.W / 2;
  kda::FoldParams fold;
  fold.state = ring.state, fold.rings = x.rings(), fold.slots = ring.slots;
  const GpuArray accept = Layer::indices(std::vector<std::int32_t>(static_cast<std::size_t>(x.N), static_cast<std::int32_t>(accepted)));
  fold.accept = accept.view(DType::kInt32, {x.N});
  r.ours_us = gpu.cold_us([&](Stream s, int) { kda::fold(fold, s); });
  r.floor_us = gpu.stream_us(items * (kStateBytes + accepted * kRecord), items * kStateBytes, true);
  r.floor = "reading and writing the states in place, measured";
  report.add("fold", {{"accepted", std::to_string(accepted)}, {"heads", std::to_string(x.H)}, {"requests", std::to_string(x.N)}}, r);
  if (x.W != 8 || x.H != 12) return;

  // What fold and verify_ring do together, when the fold waits for the verify.
  const GpuArray pending = Layer::indices(std::vector<std::int32_t>(static_cast<std::size_t>(x.N), static_cast<std::int32_t>(accepted)));
  kda::VerifyParams deferred = ring;
  deferred.pending = pending.view(DType::kInt32, {x.N});
  kda::DeferFoldParams again;
  again.pending = deferred.pending, again.slots = fold.slots, again.accept = fold.accept;
  r.ours_us = gpu.cold_us([&](Stream s, int) { kda::verify(deferred, s); }, [&](Stream s, int) { kda::defer_fold(again, s); });
  r.floor_us = gpu.stream_us(items * (kStateBytes + kWindow + accepted * kRecord) + tokens * kRead,
                             items * kStateBytes + tokens * (kWritten + kRecord));
  r.floor = "reading and writing as many bytes, measured";
  report.add("verify_deferred",
             {{"accepted", std::to_string(accepted)},
              {"heads", std::to_string(x.H)},
              {"requests", std::to_string(x.N)},
              {"tokens", std::to_string(x.W)}},
             r);
}

void decode(Report& report, Gpu& gpu, const Shape& shape) {
  const Layer x(shape);
  const std::int64_t items = x.N * x.H;
  const auto p = x.step<kda::DecodeParams>();
  Result r;
  r.ours_us = gpu.cold_us([&](Stream s, int) { kda::decode(p, s); });
  r.floor_us = gpu.stream_us(items * (kStateBytes + kWindow + kRead), items * (kStateBytes + kWindow + kDim * 2), true);
  r.floor = "reading and writing the states in place, measured";
  report.add("decode", {{"heads", std::to_string(x.H)}, {"requests", std::to_string(x.N)}, {"tokens", "1"}}, r);
}

void run(Report& report) {
  Gpu gpu(report);
  // The shapes of the targets and one axis at a time around 12 heads, 32 requests, 8 tokens; then all others of heads x tokens x requests in
  // ring mode.
  std::vector<Shape> shapes{{12, 1, 8}, {12, 8, 8}, {12, 32, 8}, {12, 128, 8}, {32, 16, 4}, {32, 64, 4}, {32, 64, 8}, {96, 8, 8}};
  for (const std::int64_t heads : {6, 24, 96}) shapes.push_back({heads, 32, 8});
  for (const std::int64_t tokens : {1, 2, 4, 6, 16}) shapes.push_back({12, 32, tokens});
  shapes.push_back({12, 256, 8});
  const auto known = [&](std::int64_t heads, std::int64_t requests, std::int64_t tokens) {
    return std::any_of(shapes.begin(), shapes.end(),
                       [&](const Shape& s) { return s.heads == heads && s.requests == requests && s.tokens == tokens; });
  };
  for (const std::int64_t heads : {6, 12, 24, 32, 96})
    for (const std::int64_t tokens : {1, 2, 4, 6, 8, 16})
      for (const std::int64_t requests : {1, 8, 32, 128, 256})
        if (!known(heads, requests, tokens)) shapes.push_back({heads, requests, tokens, false});
  if (report.quick()) shapes = {{2, 1, 4}};
  for (const Shape& shape : shapes) measure(report, gpu, shape);
  for (const std::int64_t requests : report.quick() ? std::vector<std::int64_t>{1} : std::vector<std::int64_t>{1, 8, 32, 128})
    decode(report, gpu, {12, requests, 1});
}

const bool registered = add_gpu_family("kda", run);

}  // namespace

}  // namespace specstate::bench
