#include "runtime/checkpoint.hpp"

#include <fmt/format.h>
#include <sys/mman.h>

#include <algorithm>
#include <bit>
#include <cstring>
#include <filesystem>
#include <initializer_list>
#include <limits>
#include <utility>

#include "core/match.hpp"
#include "core/numeric.hpp"
#include "runtime/safetensors.hpp"

namespace specstate::runtime {

namespace {

// Configurations are a few kilobytes.
constexpr std::size_t kMaxConfig = 1 << 20;

std::string in(const std::string& folder, const char* file) { return (std::filesystem::path(folder) / file).string(); }

bool there(const std::string& path) {
  std::error_code error;
  return std::filesystem::exists(path, error);
}

/// Reads tensors by name with the shapes that the configuration demands. Nothing is allocated before the file was seen to hold it.
class Loader {
 public:
  Loader(const std::string& path, WeightMemory& memory) : file_(path), memory_(memory) {}

  /// A packed matrix of zeros.
  PackedMatrix room_for(std::int64_t rows, std::int64_t columns) {
    return PackedMatrix(rows, columns, DType::kBFloat16, memory_.take(PackedMatrix::bytes(rows, columns, DType::kBFloat16)));
  }

  /// A dense bfloat16 matrix, copied: its place in the file need not be aligned.
  std::vector<std::uint16_t> bf16(const std::string& name, std::int64_t rows, std::int64_t columns) {
    return read<std::uint16_t>(name, DType::kBFloat16, {rows, columns}, 0x7F80);
  }
  /// The stored number of rows of a matrix whose rank is the model's own business.
  std::int64_t rank(const std::string& name, std::int64_t columns) {
    const std::int64_t shape[] = {-1, columns};
    return static_cast<std::int64_t>(file_.get(name, DType::kBFloat16, shape).size()) / 2 / columns;
  }
  PackedMatrix matrix(const std::string& name, std::int64_t rows, std::int64_t columns) {
    const std::vector<std::uint16_t> w = bf16(name, rows, columns);
    PackedMatrix m = room_for(rows, columns);
    m.set_rows(0, rows, w.data(), columns);
    return m;
  }
  struct Part {
    std::string name;
    std::int64_t rows;
  };
  /// Several matrices of one input as one.
  PackedMatrix stack(std::initializer_list<Part> parts, std::int64_t columns) {
    // All must be there before the sum of their rows is believed.
    std::vector<std::vector<std::uint16_t>> values;
    std::int64_t rows = 0;
    for (const Part& p : parts) {
      values.push_back(p.rows ? bf16(p.name, p.rows, columns) : std::vector<std::uint16_t>{});
      rows += p.rows;
    }
    PackedMatrix m = room_for(rows, columns);
    std::int64_t at = 0;
    for (const auto& v : values) {
      const std::int64_t count = static_cast<std::int64_t>(v.size()) / columns;
      if (count) m.set_rows(at, count, v.data(), columns);
      at += count;
    }
    return m;
  }
  /// Values of a bfloat16 tensor, as fp32.
  Floats values(const std::string& name, std::initializer_list<std::int64_t> shape) {
    const std::vector<std::uint16_t> stored = read<std::uint16_t>(name, DType::kBFloat16, shape, 0x7F80);
    Floats out(stored.size());
    for (std::size_t i = 0; i < out.size(); ++i) out[i] = core::to_float(core::bfloat16{stored[i]});
    return out;
  }
  Floats fp32(const std::string& name, std::initializer_list<std::int64_t> shape) {
    const std::vector<std::uint32_t> stored = read<std::uint32_t>(name, DType::kFloat32, shape, 0x7F800000);
    Floats out(stored.size());
    for (std::size_t i = 0; i < out.size(); ++i) out[i] = std::bit_cast<float>(stored[i]);
    return out;
  }
  std::int64_t parameters() const { return parameters_; }
  std::int64_t bytes() const { return bytes_; }

 private:
  /// The bits of a tensor of finite numbers: one NaN would spoil every output, far from where it came from.
  template <class Bits>
  std::vector<Bits> read(const std::string& name, DType dtype, std::initializer_list<std::int64_t> shape, Bits exponent) {
    const auto bytes = file_.get(name, dtype, {shape.begin(), shape.size()});
    std::vector<Bits> w(bytes.size() / sizeof(Bits));
    if (!w.empty()) std::memcpy(w.data(), bytes.data(), bytes.size());
    Bits largest = 0;  // a loop that vectorises
    for (const Bits x : w) largest = std::max<Bits>(largest, x & exponent);
    if (largest == exponent) {
      const auto bad = std::find_if(w.begin(), w.end(), [=](Bits x) { return (x & exponent) == exponent; });
      const bool nan = (*bad & (std::numeric_limits<Bits>::max() / 2 ^ exponent)) != 0;
      core::throw_value(fmt::format("{}: tensor '{}': expected finite numbers, got {} at element {}.", file_.path(), name,
                                    nan ? "nan" : "infinity", bad - w.begin()));
    }
    parameters_ += static_cast<std::int64_t>(w.size());
    bytes_ += static_cast<std::int64_t>(bytes.size());
    return w;
  }

  Safetensors file_;
  WeightMemory& memory_;
  std::int64_t parameters_ = 0, bytes_ = 0;
};

KdaWeights load_kda(Loader& f, const std::string& name, const TargetConfig& c) {
  KdaWeights w;
  const std::int64_t d = c.hidden, heads = c.kda_heads, channels = heads * c.kda_dim;
  const std::int64_t rf = f.rank(name + "f_a_proj.weight", d), rg = f.rank(name + "g_a_proj.weight", d);
  w.in = f.stack({{name + "q_proj.weight", channels},
                  {name + "k_proj.weight", channels},
                  {name + "v_proj.weight", channels},
                  {name + "f_a_proj.weight", rf},
                  {name + "g_a_proj.weight", rg},
                  {name + "b_proj.weight", heads}},
                 d);
  w.gate = f.matrix(name + "f_b_proj.weight", channels, rf);
  w.out_gate = f.matrix(name + "g_b_proj.weight", channels, rg);
  w.out = f.matrix(name + "o_proj.weight", d, channels);
  for (const char* s : {"q", "k", "v"}) {
    const Floats taps = f.fp32(name + s + "_conv1d.weight", {channels, 4});
    w.conv.insert(w.conv.end(), taps.begin(), taps.end());
  }
  w.a_log = f.fp32(name + "A_log", {heads});
  w.dt_bias = f.fp32(name + "dt_bias", {channels});
  w.o_norm = f.fp32(name + "o_norm.weight", {c.kda_dim});
  return w;
}

MlaWeights load_mla(Loader& f, const std::string& name, const TargetConfig& c, bool anchor) {
  MlaWeights w;
  const std::int64_t d = c.hidden, heads = c.mla_heads, rank = c.kv_lora_rank;
  const std::string index = name + "indexer.";
  w.in = f.stack({{name + "q_proj.weight", heads * (c.nope_dim + c.rope_dim)},
                  {name + "kv_a_proj_with_mqa.weight", rank + c.rope_dim},
                  {index + "wq_b.weight", anchor ? std::int64_t{c.index_heads} * c.index_dim : 0},
                  {index + "wk.weight", anchor ? c.index_dim : 0},
                  {index + "weights_proj.weight", anchor ? c.index_heads : 0}},
                 d);
  const std::vector<std::uint16_t> up = f.bf16(name + "kv_b_proj.weight", heads * (c.nope_dim + c.v_dim), rank);
  for (std::int64_t h = 0; h < heads; ++h) {
    const std::uint16_t* head = up.data() + h * (c.nope_dim + c.v_dim) * rank;
    w.key_up.push_back(f.room_for(rank, c.nope_dim));
    w.key_up.back().set_rows(0, rank, head, 1, rank);
    w.value_up.push_back(f.room_for(c.v_dim, rank));
    w.value_up.back().set_rows(0, c.v_dim, head + c.nope_dim * rank, rank);
  }
  w.out = f.matrix(name + "o_proj.weight", d, heads * c.v_dim);
  w.kv_norm = f.values(name + "kv_a_layernorm.weight", {rank});
  if (anchor) {
    w.index_norm = f.fp32(index + "k_norm.weight", {c.index_dim});
    w.index_bias = f.fp32(index + "k_norm.bias", {c.index_dim});
  }
  return w;
}

TargetWeights load_target(Loader& f, const TargetConfig& c) {
  TargetWeights w;
  w.config = c;
  const std::int64_t d = c.hidden;
  w.embed = f.values("model.embed_tokens.weight", {c.vocab, d});
  w.head = f.matrix("lm_head.weight", c.vocab, d);
  w.norm = f.values("model.norm.weight", {d});
  for (int i = 0; i < c.layers; ++i) {
    const std::string name = fmt::format("model.layers.{}.", i);
    LayerWeights layer;
    layer.input_norm = f.values(name + "input_layernorm.weight", {d});
    layer.post_norm = f.values(name + "post_attention_layernorm.weight", {d});
    if (c.is_kda[static_cast<std::size_t>(i)])
      layer.kda = load_kda(f, name + "self_attn.", c);
    else
      layer.mla = load_mla(f, name + "self_attn.", c, c.anchor_of[static_cast<std::size_t>(i)] == i);
    layer.gate_up = f.stack({{name + "mlp.gate_proj.weight", c.intermediate}, {name + "mlp.up_proj.weight", c.intermediate}}, d);
    layer.down = f.matrix(name + "mlp.down_proj.weight", d, c.intermediate);
    w.layers.push_back(std::move(layer));
  }
  return w;
}

DraftWeights load_drafter(Loader& f, const DraftConfig& c) {
  DraftWeights w;
  w.config = c;
  const std::int64_t d = c.hidden, kv = std::int64_t{c.kv_heads} * c.head_dim, q = std::int64_t{c.heads} * c.head_dim;
  w.fc = f.matrix("fc.weight", d, d * static_cast<std::int64_t>(c.feature_layers.size()));
  w.hidden_norm = f.values("hidden_norm.weight", {d});
  w.norm = f.values("norm.weight", {d});
  for (int i = 0; i < c.layers; ++i) {
    const std::string name = fmt::format("layers.{}.", i), attn = name + "self_attn.";
    DraftLayerWeights layer;
    layer.input_norm = f.values(name + "input_layernorm.weight", {d});
    layer.post_norm = f.values(name + "post_attention_layernorm.weight", {d});
    layer.q_norm = f.values(attn + "q_norm.weight", {c.head_dim});
    layer.k_norm = f.values(attn + "k_norm.weight", {c.head_dim});
    layer.qkv = f.stack({{attn + "q_proj.weight", q}, {attn + "k_proj.weight", kv}, {attn + "v_proj.weight", kv}}, d);
    layer.out = f.matrix(attn + "o_proj.weight", d, q);
    layer.gate_up = f.stack({{name + "mlp.gate_proj.weight", c.intermediate}, {name + "mlp.up_proj.weight", c.intermediate}}, d);
    layer.down = f.matrix(name + "mlp.down_proj.weight", d, c.intermediate);
    for (const char* s : {"k", "v"}) {
      const auto part = f.bf16(attn + s + "_proj.weight", kv, d);
      w.kv_weight.insert(w.kv_weight.end(), part.begin(), part.end());
    }
    w.k_norms.insert(w.k_norms.end(), layer.k_norm.begin(), layer.k_norm.end());
    w.layers.push_back(std::move(layer));
  }
  if (c.kind == DrafterKind::kDSpark) {
    w.markov_embed = f.values("markov.embed.weight", {c.vocab, c.markov_rank});
    w.markov_proj = f.matrix("markov.proj.weight", c.vocab, c.markov_rank);
    w.confidence = f.values("confidence.weight", {1, d + c.markov_rank});
    w.confidence_bias = f.fp32("confidence.bias", {1})[0];
  }
  return w;
}

}  // namespace

WeightMemory::~WeightMemory() {
  for (const Block& b : blocks_) ::munmap(b.address, b.size);
}

void* WeightMemory::take(std::int64_t bytes) {
  constexpr std::int64_t kLine = 64, kLargePage = std::int64_t{2} << 20, kBlock = 8 * kLargePage;
  const std::int64_t need = (bytes + kLine - 1) / kLine * kLine;
  if (need > left_) {
    const std::int64_t whole = std::max(kBlock, (need + kLargePage - 1) / kLargePage * kLargePage), size = whole + kLargePage;
    void* address = ::mmap(nullptr, static_cast<std::size_t>(size), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (address == MAP_FAILED) core::throw_runtime(fmt::format("{} bytes of memory for weights could not be had.", size));
    blocks_.push_back({address, static_cast<std::size_t>(size)});
    const std::uintptr_t start = (reinterpret_cast<std::uintptr_t>(address) + kLargePage - 1) / kLargePage * kLargePage;
    next_ = reinterpret_cast<char*>(start);
    left_ = whole;
    ::madvise(next_, static_cast<std::size_t>(whole), MADV_HUGEPAGE);  // a wish: without large pages it is only slower
  }
  left_ -= need;
  return std::exchange(next_, next_ + need);
}

Checkpoint load_checkpoint(const std::string& folder) {
  const std::string config = in(folder, "config.json");
  if (!there(config))
    core::throw_runtime(fmt::format("{}: expected a model folder with config.json and model.safetensors, found no config.json.", folder));
  Checkpoint c;
  const TargetConfig target = parse_target_config(read_text(config, kMaxConfig), config);
  Loader file(in(folder, "model.safetensors"), c.memory);
  c.target = load_target(file, target);
  c.parameters = file.parameters();
  c.weight_bytes = file.bytes();
  for (const auto& [part, kind, slot] :
       {std::tuple("dflash", DrafterKind::kDFlash, &c.dflash), std::tuple("dspark", DrafterKind::kDSpark, &c.dspark)}) {
    const std::string sub = in(folder, part), draft_config = in(sub, "config.json");
    if (!there(draft_config)) continue;
    const DraftConfig d = parse_draft_config(read_text(draft_config, kMaxConfig), draft_config);
    check_drafter_fits(d, target, draft_config);
    if (d.kind != kind)
      core::throw_value(fmt::format("{}: architectures: expected the drafter that the folder's name says.", draft_config));
    Loader draft_file(in(sub, "model.safetensors"), c.memory);
    *slot = load_drafter(draft_file, d);
  }
  return c;
}

std::string describe_checkpoint(const std::string& folder) {
  const Checkpoint c = load_checkpoint(folder);
  return fmt::format("{} layers, {:.2f} M parameters, {:.1f} MB{}{}", c.target.config.layers, static_cast<double>(c.parameters) / 1e6,
                     static_cast<double>(c.weight_bytes) / 1e6, c.dflash ? ", drafter dflash" : "", c.dspark ? ", drafter dspark" : "");
}

}  // namespace specstate::runtime
