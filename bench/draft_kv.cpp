// Materialization of draft KV into a paged pool: what a verify step leaves to be materialized, and prefill.
#include "specstate/draft_kv.hpp"

#include <random>
#include <vector>

#include "bench/harness.hpp"
#include "core/numeric.hpp"
#include "cpu/matmul.hpp"

namespace specstate::bench {

namespace {

struct Shape {
  std::int64_t hidden, layers, kv_heads, head_dim, rotary;
};

/// b windows of `width` rows, of each of which the first `commit` stand.
struct Step {
  std::int64_t b, width, commit;
};

class Case {
 public:
  Case(const Shape& s, const Step& step)
      : s_(s),
        step_(step),
        tokens_(step.b * step.width),
        columns_(2 * s.kv_heads * s.head_dim),
        slots_(2 * tokens_ + 16),
        weight_(random(s.layers * columns_ * s.hidden)),
        hidden_(random(tokens_ * s.hidden)),
        norm_(random(s.layers * s.head_dim)),
        k_(s.layers * slots_ * s.kv_heads * s.head_dim),
        v_(k_.size()),
        eps_(s.layers, 1e-6f),
        table_(kTable * s.rotary, 0.7f),
        positions_(tokens_),
        slot_(tokens_),
        commit_(step.b, step.commit) {
    for (std::int64_t i = 0; i < tokens_; ++i) positions_[i] = i % kTable, slot_[i] = i * 7 % slots_;
    projection_ = draft_kv::KvProjection({weight_.data(), DType::kBFloat16, {s.layers, columns_, s.hidden}});
    k_view_ = {k_.data(), DType::kBFloat16, {s.layers, slots_, s.kv_heads, s.head_dim}};
    v_view_ = {v_.data(), DType::kBFloat16, {s.layers, slots_, s.kv_heads, s.head_dim}};
  }

  void materialize(bool compact = true) {
    draft_kv::MaterializeIntoPoolParams p;
    p.ctx_hidden = {hidden_.data(), DType::kBFloat16, {tokens_, s_.hidden}};
    p.projection = projection_;
    p.k_norm_weight = {norm_.data(), DType::kBFloat16, {s_.layers, s_.head_dim}};
    p.eps = {eps_.data(), DType::kFloat32, {s_.layers}};
    p.cos_sin_cache = {table_.data(), DType::kFloat32, {kTable, s_.rotary}};
    p.positions = {positions_.data(), DType::kInt64, {tokens_}};
    p.slot_mapping = {slot_.data(), DType::kInt64, {step_.b, step_.width}};
    if (compact) p.commit_lens = {commit_.data(), DType::kInt64, {step_.b}};
    p.k_pool = {&k_view_, 1}, p.v_pool = {&v_view_, 1};
    draft_kv::materialize_into_pool(p);
  }

  /// The product of the committed rows alone, features and results in float32.
  std::function<void()> product() {
    packed_ = cpu::PackedMatrix(weight_.data(), s_.layers * columns_, s_.hidden, DType::kBFloat16);
    const std::int64_t rows = committed();
    x_.assign(rows * s_.hidden, 0.5f), y_.assign(rows * packed_.n(), 0.0f);
    return [this, rows] { cpu::matmul(packed_, x_.data(), s_.hidden, rows, y_.data(), packed_.n()); };
  }

  std::int64_t committed() const { return step_.b * step_.commit; }
  double operations() const { return 2.0 * static_cast<double>(committed() * s_.layers * columns_ * s_.hidden); }
  /// Weights once, the committed rows' features and K and V once.
  std::int64_t bytes() const { return 2 * (s_.layers * columns_ * s_.hidden + committed() * (s_.hidden + s_.layers * columns_)); }

 private:
  static constexpr std::int64_t kTable = 4096;
  static std::vector<core::bfloat16> random(std::int64_t n) {
    std::mt19937 generator(1);
    std::vector<core::bfloat16> x(n);
    for (auto& v : x) v = core::from_float<core::bfloat16>(static_cast<float>(generator() >> 8) * 0x1p-23f - 1.0f);
    return x;
  }

  Shape s_;
  Step step_;
  std::int64_t tokens_, columns_, slots_;
  std::vector<core::bfloat16> weight_, hidden_, norm_, k_, v_;
  std::vector<float> eps_, table_, x_, y_;
  std::vector<std::int64_t> positions_, slot_, commit_;
  draft_kv::KvProjection projection_;
  TensorView k_view_, v_view_;
  cpu::PackedMatrix packed_;
};

void run(Report& report) {
  const Shape embedded{192, 3, 1, 64, 32}, qwen3_4b{2560, 5, 8, 128, 128};
  std::vector<std::pair<Shape, Step>> cases{{embedded, {1, 8, 4}}};
  if (!report.quick())
    cases = {{embedded, {1, 8, 1}},  {embedded, {1, 8, 4}},   {embedded, {1, 8, 8}},  {embedded, {1, 512, 512}}, {qwen3_4b, {1, 16, 1}},
             {qwen3_4b, {1, 16, 7}}, {qwen3_4b, {1, 16, 16}}, {qwen3_4b, {8, 16, 7}}, {qwen3_4b, {1, 512, 512}}};
  for (const auto& [shape, step] : cases) {
    Case c(shape, step);
    Result r;
    r.ours_us = report.time([&] { c.materialize(); });
    const double reading = report.read_us(c.bytes()), computing = report.compute_us(c.operations());
    r.floor_us = std::max(reading, computing);
    char text[96];
    std::snprintf(text, sizeof text, "%s, measured; %.2f MB to move", reading > computing ? "reading as many bytes" : "FMA peak",
                  static_cast<double>(c.bytes()) * 1e-6);
    r.floor = text;
    r.peers["its matrix product alone"] = report.time(c.product());
    if (step.commit < step.width) r.peers["every row of the window"] = report.time([&] { c.materialize(false); });
    report.add("materialize",
               {{"committed", std::to_string(c.committed())},
                {"head_dim", std::to_string(shape.head_dim)},
                {"hidden", std::to_string(shape.hidden)},
                {"kv_heads", std::to_string(shape.kv_heads)},
                {"layers", std::to_string(shape.layers)},
                {"tokens", std::to_string(step.b * step.width)}},
               r);
  }
}

const bool registered = add_family("draft_kv", run);

}  // namespace

}  // namespace specstate::bench
