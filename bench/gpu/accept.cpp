// Acceptance on the GPU: greedy, rejection over a vocabulary of 151936, planning.
#include "specstate/accept.hpp"

#include <random>

#include "bench/gpu/gpu.hpp"

namespace specstate::bench {

namespace {

void run(Report& report) {
  Gpu gpu(report);
  std::mt19937 random(1);
  const auto uniform = [&] { return static_cast<float>(random() >> 8) * 0x1p-24f; };
  constexpr std::int64_t kWindow = 8, kVocab = 151936;
  const auto requests = report.quick() ? std::vector<std::int64_t>{2} : std::vector<std::int64_t>{1, 8, 64};
  for (const std::int64_t b : requests) {
    const Report::Keys keys = {{"requests", std::to_string(b)}, {"window", std::to_string(kWindow)}};
    GpuArray candidates(b * kWindow * 4), target(b * kWindow * 4), lens(b * 4), tokens(b * kWindow * 4), u(b * kWindow * 4);
    std::vector<std::int32_t> c(b * kWindow), t(b * kWindow);
    std::vector<float> us(b * kWindow);
    for (std::size_t i = 0; i < c.size(); ++i)
      c[i] = static_cast<std::int32_t>(random() % 2), t[i] = static_cast<std::int32_t>(random() % 2), us[i] = uniform();
    candidates.set(c), target.set(t), u.set(us);

    accept::VerifyGreedyParams g;
    g.candidates = candidates.view(DType::kInt32, {b, kWindow}), g.target_argmax = target.view(DType::kInt32, {b, kWindow});
    g.accept_lens = lens.view(DType::kInt32, {b}), g.out_tokens = tokens.view(DType::kInt32, {b, kWindow});
    Result r;
    r.floor = "an empty kernel, measured";
    r.floor_us = gpu.launch_us();
    r.ours_us = gpu.cold_us([&](Stream s, int) { accept::verify_greedy(g, s); });
    report.add("verify_greedy", keys, r);

    GpuArray p(b * kWindow * kVocab * 4), q(b * (kWindow - 1) * kVocab * 4);
    p.fill_float32(), q.fill_float32();
    accept::VerifyRejectionParams x;
    x.candidates = g.candidates, x.accept_lens = g.accept_lens, x.out_tokens = g.out_tokens;
    x.uniforms = u.view(DType::kFloat32, {b, kWindow}), x.target_probs = p.view(DType::kFloat32, {b, kWindow, kVocab});
    x.draft_probs = q.view(DType::kFloat32, {b, kWindow - 1, kVocab});
    r.ours_us = gpu.cold_us([&](Stream s, int) { accept::verify_rejection(x, s); });
    r.floor_us = gpu.read_us(2 * b * kVocab * 4);
    r.floor = "reading one row of either distribution a request, measured";
    Report::Keys with_vocab = keys;
    with_vocab["vocab"] = std::to_string(kVocab);
    report.add("verify_rejection", with_vocab, r);

    constexpr std::int64_t kProbes = 16;
    GpuArray confidences(b * kWindow * 4), probes(kProbes * 8), speed(kProbes * 4);
    std::vector<float> cs(b * kWindow), speeds(kProbes);
    std::vector<std::int64_t> counts(kProbes);
    for (float& v : cs) v = 1 - 0.3f * uniform();
    for (int i = 0; i < kProbes; ++i) counts[i] = b * (1 + i), speeds[i] = 100.f / static_cast<float>(10 + i);
    confidences.set(cs), probes.set(counts), speed.set(speeds);
    accept::PlanVerifyLengthsParams plan;
    plan.confidences = confidences.view(DType::kFloat32, {b, kWindow}), plan.lagged_confidences = plan.confidences;
    plan.probe_tokens = probes.view(DType::kInt64, {kProbes}), plan.steps_per_second = speed.view(DType::kFloat32, {kProbes});
    plan.out = g.accept_lens;
    r.ours_us = gpu.cold_us([&](Stream s, int) { accept::plan_verify_lengths(plan, s); });
    r.floor_us = gpu.launch_us();
    r.floor = "an empty kernel, measured";
    report.add("plan_verify_lengths", {{"proposals", std::to_string(kWindow)}, {"requests", std::to_string(b)}}, r);
  }
}

const bool registered = add_gpu_family("accept", run);

}  // namespace

}  // namespace specstate::bench
