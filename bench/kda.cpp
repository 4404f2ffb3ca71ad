// KDA: verify in both modes, decode and fold, with convolution, safe gate and output norm, bfloat16 activations, head dims of 128.
#include "specstate/kda.hpp"

#include <algorithm>
#include <cstring>
#include <limits>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "bench/harness.hpp"
#include "core/numeric.hpp"
#include "cpu/parallel.hpp"

namespace specstate::bench {

namespace {

using core::bfloat16;

constexpr std::int64_t kDim = 128;
constexpr double kStateBytes = 4.0 * kDim * kDim;

/// One layer's tensors for `requests` of `tokens` each.
struct Layer {
  std::int64_t H, N, W, T;
  std::vector<bfloat16> q, k, v, g, gate, out, cs_q, cs_k, cs_v, rawv, rawk, conv_q, conv_k, conv_v, beta;
  std::vector<float> w, a_log, bias, weight, state, ring_g, ring_beta, snapshots;
  std::vector<std::int32_t> slots, cu, accept;

  Layer(std::int64_t heads, std::int64_t requests, std::int64_t tokens, bool with_snapshots)
      : H(heads), N(requests), W(tokens), T(requests * tokens) {
    std::mt19937 random(1);
    const auto uniform = [&] { return static_cast<float>(random() >> 8) * 0x1p-23f - 1.0f; };
    for (auto* x : {&q, &k, &v, &g, &gate, &out}) x->resize(static_cast<std::size_t>(T * H * kDim));
    for (auto* x : {&cs_q, &cs_k, &cs_v}) x->resize(static_cast<std::size_t>(N * H * kDim * 3));
    for (auto* x : {&rawv, &rawk}) x->resize(static_cast<std::size_t>(N * H * W * kDim));
    for (auto* x : {&conv_q, &conv_k, &conv_v}) x->resize(static_cast<std::size_t>(T * H * kDim * 3));
    beta.resize(static_cast<std::size_t>(T * H));
    for (auto* x : {&q, &k, &v, &g, &gate, &cs_q, &cs_k, &cs_v, &beta})
      for (auto& y : *x) y = core::from_float<bfloat16>(uniform());
    w.resize(static_cast<std::size_t>(H * kDim * 4)), a_log.resize(static_cast<std::size_t>(H));
    bias.resize(static_cast<std::size_t>(H * kDim)), weight.resize(kDim), state.resize(static_cast<std::size_t>(N * H * kDim * kDim));
    for (auto* x : {&w, &a_log, &bias, &weight, &state})
      for (float& y : *x) y = uniform();
    ring_g.resize(static_cast<std::size_t>(N * H * W * kDim)), ring_beta.resize(static_cast<std::size_t>(N * H * W));
    if (with_snapshots) snapshots.resize(static_cast<std::size_t>(T * H * kDim * kDim));
    slots.resize(static_cast<std::size_t>(N));
    std::iota(slots.begin(), slots.end(), 0);
    for (std::int64_t r = 0; r <= N; ++r) cu.push_back(static_cast<std::int32_t>(r * W));
  }

  template <class Params>
  Params step() {
    const auto act = [](std::vector<bfloat16>& x, std::initializer_list<std::int64_t> shape) {
      return TensorView(x.data(), DType::kBFloat16, shape);
    };
    const auto f32 = [](std::vector<float>& x, std::initializer_list<std::int64_t> shape) {
      return TensorView(x.data(), DType::kFloat32, shape);
    };
    Params p;
    p.x_q = act(q, {T, H, kDim}), p.x_k = act(k, {T, H, kDim}), p.x_v = act(v, {T, H, kDim});
    p.w_q = p.w_k = p.w_v = f32(w, {H * kDim, 4});
    p.cs_q = act(cs_q, {N, H * kDim, 3}), p.cs_k = act(cs_k, {N, H * kDim, 3}), p.cs_v = act(cs_v, {N, H * kDim, 3});
    p.g = act(g, {T, H, kDim}), p.beta = act(beta, {T, H}), p.A_log = f32(a_log, {H}), p.dt_bias = f32(bias, {H, kDim});
    p.state = f32(state, {N, H, kDim, kDim});
    p.slots = TensorView(slots.data(), DType::kInt32, {N}), p.cu_seqlens = TensorView(cu.data(), DType::kInt32, {N + 1});
    p.onorm_gate = act(gate, {T, H, kDim}), p.onorm_weight = f32(weight, {kDim}), p.onorm_eps = 1e-5;
    p.out = act(out, {T, H, kDim});
    p.lower_bound = -5.0;
    return p;
  }
  kda::Rings rings() {
    return {TensorView(rawv.data(), DType::kBFloat16, {N, H, W, kDim}), TensorView(rawk.data(), DType::kBFloat16, {N, H, W, kDim}),
            TensorView(ring_g.data(), DType::kFloat32, {N, H, W, kDim}), TensorView(ring_beta.data(), DType::kFloat32, {N, H, W})};
  }
  kda::VerifyParams verify(bool ring) {
    auto p = step<kda::VerifyParams>();
    if (ring)
      p.rings = rings();
    else
      p.snapshots = TensorView(snapshots.data(), DType::kFloat32, {N, W, H, kDim, kDim});
    p.conv_q = TensorView(conv_q.data(), DType::kBFloat16, {N, W, H * kDim, 3});
    p.conv_k = TensorView(conv_k.data(), DType::kBFloat16, {N, W, H * kDim, 3});
    p.conv_v = TensorView(conv_v.data(), DType::kBFloat16, {N, W, H * kDim, 3});
    return p;
  }
};

std::string amount(double x, const char* unit) {
  char text[64];
  std::snprintf(text, sizeof text, "%.1f %s", x, unit);
  return text;
}

/// The recurrence's arithmetic takes a multiply and `fused` multiply-adds an element and token.
void add(Report& report, const std::string& operation, Report::Keys keys, double us, double bytes, double operations,
         double least_memory_us, const std::string& memory) {
  Result r;
  r.ours_us = us;
  const double computing = report.compute_us(operations);
  r.floor_us = std::max(computing, least_memory_us);
  const std::string sizes = " (" + amount(bytes / 1e6, "MB") + ", " + amount(operations / 1e6, "MFLOP") + ")";
  r.floor = (computing >= least_memory_us ? "FMA peak for the sequential recurrence, measured" : memory) + sizes;
  report.add(operation, std::move(keys), r);
}

void run(Report& report) {
  struct Shape {
    std::int64_t heads, requests, tokens;
  };
  const std::vector<Shape> shapes =
      report.quick() ? std::vector<Shape>{{2, 1, 4}} : std::vector<Shape>{{12, 1, 1}, {12, 1, 8}, {12, 1, 16}, {12, 8, 8}, {12, 32, 8}};
  for (const auto& [heads, requests, tokens] : shapes) {
    Layer x(heads, requests, tokens, true);
    const double items = static_cast<double>(heads * requests), token_items = items * static_cast<double>(tokens);
    const double elements = kDim * kDim * token_items;
    const Report::Keys keys = {
        {"heads", std::to_string(heads)}, {"requests", std::to_string(requests)}, {"tokens", std::to_string(tokens)}};
    // Per token and head: q, k, v, g and the norm's gate, beta; out; windows written; the record. Per item: state and windows read.
    const double per_token = 5 * kDim * 2 + 2 + kDim * 2 + 9 * kDim * 2, record = kDim * 2 * 2 + kDim * 4 + 4;
    const double once = items * (kStateBytes + 9 * kDim * 2);

    const kda::VerifyParams ring = x.verify(true), snap = x.verify(false);
    double bytes = once + token_items * (per_token + record);
    add(report, "verify_ring", keys, report.time([&] { kda::verify(ring); }), bytes, 7 * elements,
        report.read_us(static_cast<std::int64_t>(once)), "reading the states, measured at this size");

    const double snapshot_us = report.time([&] { kda::verify(snap); });
    const auto states = static_cast<std::int64_t>(x.snapshots.size()) / (kDim * kDim);
    const double fill_us = report.best_time([&] {
      specstate::cpu::parallel_for(states, 8, [&](std::int64_t begin, std::int64_t end) {
        std::memset(x.snapshots.data() + begin * kDim * kDim, 1, static_cast<std::size_t>(end - begin) * kDim * kDim * 4);
      });
    });
    bytes = once + token_items * (per_token + kStateBytes);
    add(report, "verify_snapshot", keys, snapshot_us, bytes, 9 * elements, fill_us, "memset of the same snapshots, measured");

    const auto decoded = x.step<kda::DecodeParams>();
    bytes = 2 * once + token_items * per_token;
    add(report, "decode", keys, report.time([&] { kda::decode(decoded); }), bytes, 7 * elements,
        report.read_us(static_cast<std::int64_t>(once)), "reading the states, measured at this size");

    if (tokens < 8) continue;
    kda::verify(ring);
    for (const std::int64_t accepted : {std::int64_t{1}, tokens / 2, tokens}) {
      x.accept.assign(static_cast<std::size_t>(requests), static_cast<std::int32_t>(accepted));
      kda::FoldParams f;
      f.state = ring.state, f.rings = x.rings(), f.slots = ring.slots;
      f.accept = TensorView(x.accept.data(), DType::kInt32, {requests});
      bytes = items * (2 * kStateBytes + static_cast<double>(accepted) * record);
      add(report, "fold",
          {{"accepted", std::to_string(accepted)}, {"heads", std::to_string(heads)}, {"requests", std::to_string(requests)}},
          report.time([&] { kda::fold(f); }), bytes, 5 * kDim * kDim * items * static_cast<double>(accepted),
          report.read_us(static_cast<std::int64_t>(items * kStateBytes)), "reading the states, measured at this size");
    }
  }
}

const bool registered = add_family("kda", run);

}  // namespace

}  // namespace specstate::bench
