// Materialization of draft KV on the GPU: what a verify step leaves to be materialized, and prefill, beside the bare product of the same rows.
#include "specstate/draft_kv.hpp"

#include <algorithm>

#include "bench/gpu/cublaslt.hpp"
#include "bench/gpu/gpu.hpp"

namespace specstate::bench {

namespace {

struct Shape {
  std::int64_t hidden, layers, features;  // features: of all layers of the target that are taken
  std::int64_t heads = 8, dim = 128;
};
constexpr std::int64_t kTable = 40960;

/// b windows of `width` rows, of each of which the first `commit` stand.
struct Step {
  std::int64_t b, width, commit;
  std::int64_t tokens() const { return b * width; }
  std::int64_t committed() const { return b * commit; }
};

/// The tensors of a shape; a step uses their first rows. `from_features`: with fc and its norm in front.
class Model {
 public:
  Model(const Shape& s, std::int64_t tokens, bool from_features)
      : s_(s),
        width_(from_features ? s.features : s.hidden),
        slots_(tokens + 16),
        weight_(columns() * s.hidden * 2),
        input_(tokens * width_ * 2),
        fc_(from_features ? s.hidden * s.features * 2 : 16),
        context_(from_features ? tokens * s.hidden * 2 : 16),
        hidden_norm_(s.hidden * 2),
        norm_(s.layers * s.dim * 2),
        eps_(s.layers * 4),
        table_(kTable * s_.dim * 4),
        positions_(tokens * 8),
        slot_(tokens * 8),
        commit_(tokens * 8),
        k_(s.layers * slots_ * s_.heads * s_.dim * 2),
        v_(s.layers * slots_ * s_.heads * s_.dim * 2),
        product_(tokens * std::max(columns(), s.hidden) * 2),
        workspace_(static_cast<std::size_t>(workspace_bytes(s, tokens, width_))) {
    weight_.fill_bfloat16(0.02f), input_.fill_bfloat16(1, 2), norm_.fill_bfloat16(1, 3), table_.fill_float32(1, 4);
    fc_.fill_bfloat16(0.02f, 5), context_.fill_bfloat16(1, 6), hidden_norm_.fill_bfloat16(1, 7);
    eps_.set(std::vector<float>(s.layers, 1e-6f));
    std::vector<std::int64_t> slot(tokens), position(tokens);
    for (std::int64_t i = 0; i < tokens; ++i) slot[i] = (i / 16 * 7 % ((tokens + 15) / 16)) * 16 + i % 16, position[i] = i % kTable;
    for (auto& x : slot) x = std::min(x, slots_ - 1);
    slot_.set(slot), positions_.set(position);
  }

  draft_kv::MaterializeIntoPoolParams params(const Step& step) {
    commit_.set(std::vector<std::int64_t>(step.b, step.commit));
    k_view_ = k_.view(DType::kBFloat16, {s_.layers, slots_, s_.heads, s_.dim}),
    v_view_ = v_.view(DType::kBFloat16, {s_.layers, slots_, s_.heads, s_.dim});
    draft_kv::MaterializeIntoPoolParams p;
    const std::int64_t rows = step.tokens();
    p.ctx_hidden = input_.view(DType::kBFloat16, {rows, width_});
    if (from_features()) {
      p.fc_weight = fc_.view(DType::kBFloat16, {s_.hidden, s_.features});
      p.hidden_norm_weight = hidden_norm_.view(DType::kBFloat16, {s_.hidden});
    }
    p.kv_weight = weight_.view(DType::kBFloat16, {s_.layers, 2 * s_.heads * s_.dim, s_.hidden});
    p.k_norm_weight = norm_.view(DType::kBFloat16, {s_.layers, s_.dim});
    p.eps = eps_.view(DType::kFloat32, {s_.layers});
    p.cos_sin_cache = table_.view(DType::kFloat32, {kTable, s_.dim});
    p.positions = positions_.view(DType::kInt64, {rows});
    p.slot_mapping = slot_.view(DType::kInt64, {step.b, step.width});
    if (step.commit < step.width) p.commit_lens = commit_.view(DType::kInt64, {step.b});
    p.k_pool = {&k_view_, 1}, p.v_pool = {&v_view_, 1};
    p.workspace = workspace_.view(DType::kUInt8, {static_cast<std::int64_t>(workspace_.bytes())});
    return p;
  }

  /// Of the longest call, which needs the most, by its shapes alone.
  static std::int64_t workspace_bytes(const Shape& s, std::int64_t tokens, std::int64_t width) {
    const auto of = [](DType dtype, std::initializer_list<std::int64_t> shape) {
      return TensorView(nullptr, dtype, shape, {DeviceType::kCuda, 0});
    };
    draft_kv::MaterializeIntoPoolParams p;
    p.ctx_hidden = of(DType::kBFloat16, {tokens, width}), p.kv_weight = of(DType::kBFloat16, {s.layers, 2 * s.heads * s.dim, s.hidden});
    if (width != s.hidden) p.fc_weight = of(DType::kBFloat16, {s.hidden, s.features});
    p.k_norm_weight = of(DType::kBFloat16, {s.layers, s.dim}), p.cos_sin_cache = of(DType::kFloat32, {kTable, s.dim});
    const TensorView v = of(DType::kBFloat16, {s.layers, tokens, s.heads, s.dim});
    p.v_pool = {&v, 1};
    return std::max<std::int64_t>(draft_kv::materialize_workspace_bytes(p), 16);
  }
  std::int64_t columns() const { return s_.layers * 2 * s_.heads * s_.dim; }
  bool from_features() const { return width_ != s_.hidden; }
  std::int64_t read_bytes(std::int64_t rows) const {
    return 2 * (columns() * s_.hidden + rows * width_ + (from_features() ? s_.hidden * s_.features : 0));
  }
  std::int64_t written_bytes(std::int64_t rows) const { return 2 * rows * columns(); }
  double operations(std::int64_t rows) const {
    const auto of = [&](std::int64_t n, std::int64_t k) {
      return 2.0 * static_cast<double>(rows) * static_cast<double>(n) * static_cast<double>(k);
    };
    return of(columns(), s_.hidden) + (from_features() ? of(s_.hidden, s_.features) : 0);
  }
  CublasLt::Product product(const CublasLt& lt, std::int64_t rows) const { return lt.product(rows, columns(), s_.hidden); }
  void run(const CublasLt::Product& p, std::size_t algorithm, Stream s) const {
    p.run(algorithm, from_features() ? context_.data() : input_.data(), weight_.data(), product_.data(),
          static_cast<cudaStream_t>(s.handle));
  }
  CublasLt::Product fc_product(const CublasLt& lt, std::int64_t rows) const { return lt.product(rows, s_.hidden, s_.features); }
  void run_fc(const CublasLt::Product& p, std::size_t algorithm, Stream s) const {
    p.run(algorithm, input_.data(), fc_.data(), product_.data(), static_cast<cudaStream_t>(s.handle));
  }

 private:
  Shape s_;
  std::int64_t width_, slots_;
  GpuArray weight_, input_, fc_, context_, hidden_norm_, norm_, eps_, table_, positions_, slot_, commit_, k_, v_, product_, workspace_;
  TensorView k_view_, v_view_;
};

/// The launch function: a projection that was made elsewhere is read once and written once.
void run_stacked(Gpu& gpu, Report& report) {
  constexpr std::int64_t layers = 5, kHeads = 8, kDim = 128, width = 2 * kHeads * kDim;
  const std::vector<std::int64_t> sizes = report.quick() ? std::vector<std::int64_t>{256} : std::vector<std::int64_t>{16, 256, 1024, 8192};
  const std::size_t most = static_cast<std::size_t>(sizes.back() * layers * width) * 2;
  GpuArray kv(most), k(most / 2), v(most / 2), norm(layers * kDim * 2), eps(layers * 4), table(kTable * kDim * 4),
      positions(sizes.back() * 8);
  kv.fill_bfloat16(), norm.fill_bfloat16(1, 2), table.fill_float32(1, 3);
  eps.set(std::vector<float>(layers, 1e-6f));
  std::vector<std::int64_t> position(sizes.back());
  for (std::size_t i = 0; i < position.size(); ++i) position[i] = static_cast<std::int64_t>(i * 7) % kTable;
  positions.set(position);
  for (const std::int64_t tokens : sizes) {
    draft_kv::FusedNormRopeStackedParams p;
    p.kv = kv.view(DType::kBFloat16, {tokens, layers, width});
    p.k_norm_weight = norm.view(DType::kBFloat16, {layers, kDim}), p.eps = eps.view(DType::kFloat32, {layers});
    p.cos_sin_cache = table.view(DType::kFloat32, {kTable, kDim}), p.positions = positions.view(DType::kInt64, {tokens});
    p.num_kv_heads = kHeads, p.head_dim = kDim, p.rotary_dim = kDim;
    p.k_out = k.view(DType::kBFloat16, {layers, tokens, kHeads, kDim}), p.v_out = v.view(DType::kBFloat16, {layers, tokens, kHeads, kDim});
    Result r;
    r.ours_us = gpu.cold_us([&](Stream s, int) { draft_kv::fused_norm_rope_stacked(p, s); });
    const std::int64_t bytes = tokens * layers * width * 2;
    r.floor_us = gpu.stream_us(bytes + tokens * kDim * 4, bytes);
    r.floor = "reading the projection and the rotary rows and writing K and V, measured";
    report.add("fused_norm_rope_stacked",
               {{"head_dim", std::to_string(kDim)},
                {"kv_heads", std::to_string(kHeads)},
                {"layers", std::to_string(layers)},
                {"tokens", std::to_string(tokens)}},
               r);
  }
}

/// The steps of one shape. `peak`: operations a second, the best that a product of this run has shown.
void run_steps(Gpu& gpu, Report& report, const CublasLt& lt, const Shape& shape, const std::vector<Step>& steps, bool from_features,
               double& peak) {
  std::int64_t most = 0;
  if (steps.empty()) return;
  for (const Step& s : steps) most = std::max(most, s.tokens());
  Model m(shape, most, from_features);
  for (const Step& step : steps) {
    const std::int64_t rows = step.committed();
    Report::Keys keys{{"committed", step.commit == step.width ? "1" : "0.4375"},
                      {"head_dim", std::to_string(shape.dim)},
                      {"hidden", std::to_string(shape.hidden)},
                      {"kv_heads", std::to_string(shape.heads)},
                      {"layers", std::to_string(shape.layers)},
                      {"tokens", std::to_string(step.tokens())}};
    if (from_features) keys["features"] = std::to_string(shape.features);
    Result r;
    const auto params = m.params(step);
    std::vector<Gpu::Call> calls{[&](Stream s, int) { draft_kv::materialize_into_pool(params, s); }};
    if (lt.here()) {
      const CublasLt::Product product = m.product(lt, rows), fc = from_features ? m.fc_product(lt, rows) : m.product(lt, rows);
      // Of few rows all that the library proposes, of many, where its first proposals differ little, two.
      const auto tried = [&](const CublasLt::Product& p) { return rows > 256 ? std::min<std::size_t>(p.algorithms(), 2) : p.algorithms(); };
      for (std::size_t i = 0; i < tried(product); ++i) calls.push_back([&m, &product, i](Stream s, int) { m.run(product, i, s); });
      if (from_features)
        for (std::size_t i = 0; i < tried(fc); ++i) calls.push_back([&m, &fc, i](Stream s, int) { m.run_fc(fc, i, s); });
      const std::vector<double> us = gpu.cold_us(calls);
      r.ours_us = us[0];
      const auto second = us.begin() + 1 + static_cast<std::ptrdiff_t>(tried(product));
      double products = *std::min_element(us.begin() + 1, second);
      if (from_features) products += *std::min_element(second, us.end());
      r.peers[from_features ? "cuBLASLt, the bare products alone" : "cuBLASLt, its bare product alone"] = products;
      if (rows >= 4096) peak = std::max(peak, m.operations(rows) / (products * 1e-6));
    } else {
      r.ours_us = gpu.cold_us(calls).front();
    }
    const double moving = gpu.stream_us(m.read_bytes(rows), m.written_bytes(rows)), computing = m.operations(rows) / peak * 1e6;
    r.floor_us = std::max(moving, computing);
    r.floor = moving > computing ? "reading weights and rows and writing K and V, measured"
                                 : "its operations at the best rate of cuBLASLt, at least 790 TFLOP/s";
    report.add(from_features ? "from_features" : "materialize", keys, r);
  }
}

void run(Report& report) {
  Gpu gpu(report);
  const CublasLt lt;
  struct Steps {
    Shape shape;
    std::vector<Step> projection, chain;
  };
  std::vector<Steps> all{
      {{4096, 5, 5 * 4096},  // Qwen3-8B
       {{1, 1, 1},
        {1, 16, 16},
        {1, 16, 7},
        {1, 64, 64},
        {1, 256, 256},
        {32, 16, 7},
        {1, 1024, 1024},
        {256, 16, 7},
        {1, 8192, 8192},
        {1024, 16, 7},
        {1, 16384, 16384}},
       {{1, 1, 1}, {1, 16, 7}, {1, 64, 64}, {32, 16, 7}, {256, 16, 7}, {1, 8192, 8192}, {1, 16384, 16384}}},
      {{2560, 5, 5 * 2560},  // Qwen3-4B
       {{1, 1, 1}, {1, 16, 7}, {1, 64, 64}, {1, 256, 256}, {32, 16, 7}, {1, 1024, 1024}, {256, 16, 7}, {1024, 16, 7}, {1, 16384, 16384}},
       {{1, 16, 7}, {32, 16, 7}, {1, 16384, 16384}}},
      {{7168, 6, 6 * 7168},  // like K3
       {{1, 1, 1}, {1, 16, 7}, {1, 64, 64}, {1, 256, 256}, {32, 16, 7}, {1, 1024, 1024}, {256, 16, 7}, {1024, 16, 7}, {1, 16384, 16384}},
       {{1, 16, 7}, {32, 16, 7}}},
      {{4096, 5, 0, 4, 256}, {{1, 1, 1}, {1, 16, 16}, {1, 64, 64}, {1, 256, 256}, {1, 1024, 1024}}, {}}};  // heads that no epilogue knows
  if (report.quick()) all = {{{2560, 5, 5 * 2560}, {{1, 16, 7}}, {{1, 16, 7}}}};
  double peak = 790e12;  // where there is no product to measure
  run_stacked(gpu, report);
  for (const Steps& s : all) run_steps(gpu, report, lt, s.shape, s.projection, false, peak);
  for (const Steps& s : all) run_steps(gpu, report, lt, s.shape, s.chain, true, peak);
}

const bool registered = add_gpu_family("draft_kv", run);

}  // namespace

}  // namespace specstate::bench
