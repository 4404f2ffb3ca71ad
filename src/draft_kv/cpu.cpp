// CPU form: tiles of rows. A tile's features are gathered (only rows that are written), projected for all layers at once, and each
// (row, layer, head) is then normed, rotated and stored where it belongs. What lives between is one tile of float32.
#include <algorithm>
#include <type_traits>
#include <utility>
#include <vector>

#include "cpu/parallel.hpp"
#include "cpu/vector.hpp"
#include "draft_kv/args.hpp"
#include "draft_kv/projection.hpp"

namespace specstate::draft_kv::cpu {

using specstate::cpu::parallel_for;

namespace {

constexpr std::int64_t kGrain = 8192;  // values of K and V that are worth handing to another thread

/// Rounds to T and back.
template <class T>
void round_all(float* x, std::int64_t n) {
  if constexpr (std::is_same_v<T, core::bfloat16>)
    specstate::cpu::round_to_bfloat16(x, n);
  else if constexpr (!std::is_same_v<T, float>)
    for (std::int64_t i = 0; i < n; ++i) x[i] = core::to_float(core::from_float<T>(x[i]));
}

/// Elements first, first + stride, ... of a tensor as float32.
void load(const TensorView& t, std::int64_t first, std::int64_t stride, std::int64_t n, float* to) {
  if (stride == 1 && t.dtype == DType::kBFloat16) return specstate::cpu::to_float(t.as<core::bfloat16>() + first, to, n);
  core::visit_float(t.dtype, [&](auto* tag) {
    const auto* from = static_cast<decltype(tag)>(t.data) + first;
    for (std::int64_t i = 0; i < n; ++i) to[i] = core::to_float(from[i * stride]);
  });
}

template <class T>
void store(const float* from, std::int64_t n, T* to, std::int64_t stride) {
  if constexpr (std::is_same_v<T, core::bfloat16>)
    if (stride == 1) return specstate::cpu::to_bfloat16(from, to, n);
  for (std::int64_t i = 0; i < n; ++i) to[i * stride] = core::from_float<T>(from[i]);
}

/// What norm and rotary need of the layers, as dense float32.
class NormRopeTables {
 public:
  NormRopeTables(const NormRope& x, std::int64_t layers) : x_(x), weight_(layers * x.head_dim), eps_(layers) {
    for (std::int64_t l = 0; l < layers; ++l) {
      load(x.k_norm_weight, l * x.k_norm_weight.strides[0], x.k_norm_weight.strides[1], x.head_dim, &weight_[l * x.head_dim]);
      eps_[l] = x.eps.as<float>()[l * x.eps.strides[0]];
    }
  }
  const float* weight(std::int64_t layer) const { return &weight_[layer * x_.head_dim]; }
  float eps(std::int64_t layer) const { return eps_[layer]; }
  /// Row `position` of a layer's rotary table, R floats: where it lies, or converted into `scratch`.
  const float* angles(std::int64_t layer, std::int64_t position, float* scratch) const {
    const TensorView& t = x_.cos_sin_cache;
    const int d = t.ndim - 2;
    const std::int64_t first = (d ? layer * t.strides[0] : 0) + position * t.strides[d];
    if (t.dtype == DType::kFloat32 && t.strides[d + 1] == 1) return t.as<float>() + first;
    load(t, first, t.strides[d + 1], x_.rotary_dim, scratch);
    return scratch;
  }

 private:
  const NormRope& x_;
  std::vector<float> weight_, eps_;
};

/// One K head, in place: y = p / sqrt(mean(p^2) + eps) * w over all channels, then the rotary on the first R. The caller rounds.
template <class Io>
void norm_rope(const NormRope& x, const float* weight, float eps, const float* angles, float* p) {
  const std::int64_t half = x.rotary_dim / 2;
  specstate::cpu::rms_norm(p, weight, eps, p, x.head_dim);
  if (x.round_after_norm) round_all<Io>(p, x.head_dim);
  if (x.is_neox_style) return specstate::cpu::rotate_halves(p, p + half, angles, angles + half, half);
  for (std::int64_t j = 0; j < half; ++j) {
    const RotaryPair pair = rotary_pair(j, half, false);
    specstate::cpu::rotate(p[pair.first], p[pair.second], angles[j], angles[half + j]);
  }
}

/// A head's channels into its slot: to Io, then to the pool's type.
template <class Io>
void write(const LayerPool& pool, DType dtype, std::int64_t slot, std::int64_t head, float scale, std::int64_t n, float* x) {
  const std::int64_t offset = pool_offset(pool, slot, head);
  core::visit_float(dtype, [&](auto* tag) {
    using Stored = std::remove_pointer_t<decltype(tag)>;
    if constexpr (!std::is_same_v<Stored, Io>) round_all<Io>(x, n);  // the store itself rounds to Io otherwise
    if (scale != 1.0f)
      for (std::int64_t i = 0; i < n; ++i) x[i] /= scale;
    store(x, n, static_cast<Stored*>(pool.data) + offset, pool.channel_stride);
  });
}

DType stored_type(DType pool) { return pool == DType::kUInt8 ? DType::kFloat8E4M3FN : pool; }

/// Floats that stay with the thread between calls: at most a tile, whatever the number of tokens. Fresh memory for each call costs more
/// than it seems, since giving it back makes the other threads' cores forget their page tables. Taken out of its place while it is in use: a
/// thread that waits for others may be given another materialization meanwhile.
class TileMemory {
 public:
  explicit TileMemory(std::int64_t n) : memory_(std::exchange(kept(), {})) {
    if (static_cast<std::int64_t>(memory_.size()) < n) memory_.resize(n);
  }
  ~TileMemory() { kept() = std::move(memory_); }
  TileMemory(const TileMemory&) = delete;
  TileMemory& operator=(const TileMemory&) = delete;
  float* data() { return memory_.data(); }

 private:
  static std::vector<float>& kept() {
    thread_local std::vector<float> memory;
    return memory;
  }
  std::vector<float> memory_;
};

/// A matrix [n, k] of any of the storage types and strides, packed for the product.
specstate::cpu::PackedMatrix packed_matrix(const TensorView& w) {
  if (w.dtype != DType::kFloat16) {
    specstate::cpu::PackedMatrix packed(w.sizes[0], w.sizes[1], w.dtype);
    packed.set_rows(0, w.sizes[0], w.data, w.strides[0], w.strides[1]);
    return packed;
  }
  specstate::cpu::PackedMatrix packed(w.sizes[0], w.sizes[1], DType::kFloat32);  // the product knows no float16; float32 holds it exactly
  std::vector<float> row(w.sizes[1]);
  for (std::int64_t i = 0; i < w.sizes[0]; ++i) {
    load(w, i * w.strides[0], w.strides[1], w.sizes[1], row.data());
    packed.set_rows(i, 1, row.data(), w.sizes[1]);
  }
  return packed;
}

template <class Io>
void materialize(const MaterializeArgs& x) {
  const auto& packed = *x.projection.get();
  const NormRope& nr = x.norm_rope;
  const NormRopeTables tables(nr, x.layers);
  const DType k_type = stored_type(x.k_dtype), v_type = stored_type(x.v_dtype);
  const std::int64_t rows = static_cast<std::int64_t>(x.rows.size()), width = packed.columns, columns = x.layers * width;
  // The tile: enough rows to pay for streaming the weights, few enough that it stays in the cache between product and store.
  const std::int64_t tile = std::clamp<std::int64_t>((std::int64_t{1} << 19) / columns, 16, 256);
  // Target features pass through `raw` on their way to `features`.
  const bool from_target = x.fc_weight.given();
  const std::int64_t most = std::min(tile, rows), raw_width = from_target ? x.ctx_hidden.sizes[1] : 0;
  specstate::cpu::PackedMatrix fc;
  std::vector<float> hidden_norm(from_target ? packed.hidden : 0);
  if (from_target) {
    fc = packed_matrix(x.fc_weight);
    load(x.hidden_norm_weight, 0, x.hidden_norm_weight.strides[0], packed.hidden, hidden_norm.data());
  }
  TileMemory memory(most * (packed.hidden + columns + raw_width));
  float *features = memory.data(), *projected = features + most * packed.hidden, *raw = projected + most * columns;
  for (std::int64_t first = 0; first < rows; first += tile) {
    const std::int64_t n = std::min(tile, rows - first);
    const WrittenRow* row = x.rows.data() + first;
    for (std::int64_t r = 0; r < n; ++r) {
      const std::int64_t width = x.ctx_hidden.sizes[1];
      float* to = from_target ? raw + r * width : features + r * width;
      load(x.ctx_hidden, row[r].row * x.ctx_hidden.strides[0], x.ctx_hidden.strides[1], width, to);
      if (x.ctx_hidden.dtype != nr.io) round_all<Io>(to, width);
    }
    if (from_target) {
      specstate::cpu::matmul(fc, raw, raw_width, n, features, packed.hidden);
      for (std::int64_t r = 0; r < n; ++r) {
        float* to = features + r * packed.hidden;
        round_all<Io>(to, packed.hidden);
        specstate::cpu::rms_norm(to, hidden_norm.data(), x.hidden_norm_eps, to, packed.hidden);
        round_all<Io>(to, packed.hidden);
      }
    }
    specstate::cpu::matmul(packed.weight, features, packed.hidden, n, projected, columns,
                           {.bias = packed.bias.empty() ? nullptr : packed.bias.data()});
    parallel_for(n * x.layers, 1 + kGrain / width, [&](std::int64_t begin, std::int64_t end) {
      std::vector<float> scratch(nr.rotary_dim);
      for (std::int64_t i = begin; i < end; ++i) {
        const std::int64_t r = i / x.layers, l = i % x.layers;
        float* p = projected + r * columns;
        round_all<Io>(p + l * width, x.heads * nr.head_dim);
        const float* angles = tables.angles(l, row[r].position, scratch.data());
        for (std::int64_t h = 0; h < x.heads; ++h) {
          float* k = p + k_column(width, l, h, nr.head_dim);
          norm_rope<Io>(nr, tables.weight(l), tables.eps(l), angles, k);
          write<Io>(x.k[l], k_type, row[r].slot, h, x.k_scale[l], nr.head_dim, k);
          float* v = p + v_column(width, l, x.heads, nr.head_dim, h, x.v_head_dim);
          write<Io>(x.v[l], v_type, row[r].slot, h, x.v_scale[l], x.v_head_dim, v);
        }
      }
    });
  }
}

template <class Io>
void fused(const FusedNormRopeStackedArgs& x) {
  const NormRope& nr = x.norm_rope;
  const NormRopeTables tables(nr, x.layers);
  const std::int64_t dim = nr.head_dim, width = layer_columns(x.heads, dim, dim);
  parallel_for(x.tokens * x.layers, 1 + kGrain / width, [&](std::int64_t begin, std::int64_t end) {
    std::vector<float> scratch(nr.rotary_dim), p(dim);
    for (std::int64_t i = begin; i < end; ++i) {
      const std::int64_t t = i / x.layers, l = i % x.layers;
      const std::int64_t position = x.positions.dtype == DType::kInt64 ? x.positions.as<std::int64_t>()[t * x.positions.strides[0]]
                                                                       : x.positions.as<std::int32_t>()[t * x.positions.strides[0]];
      const float* angles = tables.angles(l, position, scratch.data());
      const std::int64_t from = t * x.kv.strides[0] + l * x.kv.strides[1], step = x.kv.strides[2];
      for (std::int64_t h = 0; h < x.heads; ++h) {
        const auto put = [&](const TensorView& out) {
          store(p.data(), dim, static_cast<Io*>(out.data) + l * out.strides[0] + t * out.strides[1] + h * out.strides[2], out.strides[3]);
        };
        load(x.kv, from + k_column(width, 0, h, dim) * step, step, dim, p.data());
        norm_rope<Io>(nr, tables.weight(l), tables.eps(l), angles, p.data());
        put(x.k_out);
        load(x.kv, from + v_column(width, 0, x.heads, dim, h, dim) * step, step, dim, p.data());
        put(x.v_out);
      }
    }
  });
}

template <class F>
void visit_io(DType io, F&& f) {
  if (io == DType::kBFloat16) return f(static_cast<core::bfloat16*>(nullptr));
  if (io == DType::kFloat16) return f(static_cast<core::float16*>(nullptr));
  f(static_cast<float*>(nullptr));
}

}  // namespace

void run(const MaterializeArgs& args, Stream) {
  if (args.rows.empty()) return;
  visit_io(args.norm_rope.io, [&](auto* tag) { materialize<std::remove_pointer_t<decltype(tag)>>(args); });
}

void run(const FusedNormRopeStackedArgs& args, Stream) {
  if (args.tokens == 0) return;
  visit_io(args.norm_rope.io, [&](auto* tag) { fused<std::remove_pointer_t<decltype(tag)>>(args); });
}

}  // namespace specstate::draft_kv::cpu
