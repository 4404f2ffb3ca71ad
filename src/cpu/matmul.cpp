#include "cpu/matmul.hpp"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <new>
#include <string>
#include <vector>

#include "core/numeric.hpp"
#include "cpu/parallel.hpp"
#include "specstate/error.hpp"

// The layout. A panel is 16 outputs. fp32: element (i, lane) at 16 i + lane. bf16: two successive k share a 32-bit word, the even one
// in the low half, so that one load gives two expanded vectors for a shift and a mask: word (i / 2, lane) at 16 (i / 2) + lane.

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu/matmul.cpp"
#include "cpu/simd.hpp"
//
#include "hwy/foreach_target.h"
#include "hwy/highway.h"
//
#include "hwy/cache_control.h"

#ifndef SPECSTATE_CPU_MATMUL_ONCE
#define SPECSTATE_CPU_MATMUL_ONCE
namespace specstate::cpu {

constexpr std::int64_t kPanel = 16;    // outputs in a panel
constexpr std::int64_t kUnit = 2;      // panels in the smallest piece of work: 32 outputs
constexpr std::int64_t kAhead = 2048;  // bytes fetched ahead where rows are many, the next panels after the end of these
constexpr std::int64_t kGroup = 8;     // panels that pass the rows together: from then on they are in the first two cache levels

struct MatmulCall {
  const std::uint8_t* w;
  std::int64_t panel_bytes, n, k;
  bool bf16;
  const float* x;
  std::int64_t x_stride;
  float* y;
  std::int64_t y_stride;
  MatmulAdd plus;
};

/// The last panel, which the outputs do not fill.
inline void finish_last(const MatmulCall& c, std::int64_t row, int rows, std::int64_t column, std::int64_t columns, const float* sums,
                        std::int64_t sums_stride) {
  for (int r = 0; r < rows; ++r)
    for (std::int64_t j = 0; j < columns; ++j) {
      float s = sums[r * sums_stride + j];
      if (c.plus.bias) s += c.plus.bias[column + j];
      if (c.plus.add) s += c.plus.add[(row + r) * c.plus.add_stride + column + j];
      c.y[(row + r) * c.y_stride + column + j] = s;
    }
}

}  // namespace specstate::cpu
#endif

HWY_BEFORE_NAMESPACE();
namespace specstate::cpu::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

using DF = hn::CappedTag<float, kPanel>;
using DU = hn::RebindToUnsigned<DF>;
using VF = hn::Vec<DF>;
constexpr int kLanes = static_cast<int>(hn::MaxLanes(DF()));
constexpr int kVecs = kPanel / kLanes;  // vectors in a panel

// Accumulators: half of the register file. The rest holds expanded weights and broadcasts.
#if HWY_TARGET == HWY_AVX3 || HWY_TARGET == HWY_NEON
constexpr int kAccumulators = 16;
#else
constexpr int kAccumulators = 8;
#endif
constexpr int kMaxRows = std::clamp(kAccumulators / kVecs, 1, 8);
constexpr int panels_at_once(int rows) { return std::clamp(kAccumulators / (rows * kVecs), 1, static_cast<int>(kGroup)); }

// R rows of kPanels neighbouring panels. xt is [k][R]: R broadcasts a step from one stream.
template <int R, int kPanels, bool kBf16>
HWY_NOINLINE void tile(const MatmulCall& c, std::int64_t panel, const float* HWY_RESTRICT xt, std::int64_t row) {
  const DF d;
  const DU du;
  constexpr int V = kPanels * kVecs;
  VF acc[R][V];
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 16
    for (int v = 0; v < V; ++v) acc[r][v] = hn::Zero(d);

  const std::uint8_t* HWY_RESTRICT w = c.w + panel * c.panel_bytes;
  const std::int64_t panel_bytes = c.panel_bytes;
  const auto word = [&](int v) HWY_ATTR { return w + (v / kVecs) * panel_bytes + (v % kVecs) * kLanes * 4; };
  // One k: kVecs weights per panel against the R values at xt.
  const auto step = [&](const VF(&weight)[V]) HWY_ATTR {
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
      const VF b = hn::Set(d, xt[r]);
#pragma GCC unroll 16
      for (int v = 0; v < V; ++v) acc[r][v] = hn::MulAdd(b, weight[v], acc[r][v]);
    }
    xt += R;
  };
  if constexpr (kBf16) {
    const auto high = hn::Set(du, 0xFFFF0000u);
    const auto pair = [&](int v) HWY_ATTR { return hn::Load(du, reinterpret_cast<const std::uint32_t*>(word(v))); };
    const auto even_of = [&](hn::Vec<DU> p) HWY_ATTR { return hn::BitCast(d, hn::ShiftLeft<16>(p)); };
    const auto odd_of = [&](hn::Vec<DU> p) HWY_ATTR { return hn::BitCast(d, hn::And(p, high)); };
    for (std::int64_t i = c.k / 2; i > 0; --i) {
      if constexpr (R <= 2) {  // few rows: hold the broadcasts, expand one vector at a time
        VF b[2][R];
#pragma GCC unroll 16
        for (int r = 0; r < R; ++r) b[0][r] = hn::Set(d, xt[r]), b[1][r] = hn::Set(d, xt[R + r]);
#pragma GCC unroll 16
        for (int v = 0; v < V; ++v) {
          const auto p = pair(v);
          const VF even = even_of(p), odd = odd_of(p);
#pragma GCC unroll 16
          for (int r = 0; r < R; ++r) acc[r][v] = hn::MulAdd(b[1][r], odd, hn::MulAdd(b[0][r], even, acc[r][v]));
        }
        xt += 2 * R;
      } else {  // many rows: hold the weights
        VF even[V], odd[V];
        const std::int64_t ahead = i * kPanel * 4 > kAhead ? kAhead : kAhead + (kPanels - 1) * panel_bytes;
#pragma GCC unroll 16
        for (int v = 0; v < V; ++v) {
          if (v % kVecs == 0) hwy::Prefetch(word(v) + ahead);  // few streams: the hardware alone leaves memory waiting
          const auto p = pair(v);
          even[v] = even_of(p);
          odd[v] = odd_of(p);
        }
        step(even);
        step(odd);
      }
      w += kPanel * 4;
    }
    if (c.k % 2) {
      VF last[V];
#pragma GCC unroll 16
      for (int v = 0; v < V; ++v) last[v] = even_of(pair(v));
      step(last);
    }
  } else {
    for (std::int64_t i = c.k; i > 0; --i) {
      VF weight[V];
#pragma GCC unroll 16
      for (int v = 0; v < V; ++v) weight[v] = hn::Load(d, reinterpret_cast<const float*>(word(v)));
      step(weight);
      w += kPanel * 4;
    }
  }

  const std::int64_t column = panel * kPanel, columns = std::min<std::int64_t>(c.n - column, kPanels * kPanel);
  if (columns == kPanels * kPanel) {
    if (c.plus.bias)
#pragma GCC unroll 16
      for (int v = 0; v < V; ++v) {
        const VF bias = hn::LoadU(d, c.plus.bias + column + v * kLanes);
#pragma GCC unroll 16
        for (int r = 0; r < R; ++r) acc[r][v] = hn::Add(acc[r][v], bias);
      }
    if (c.plus.add)
#pragma GCC unroll 16
      for (int r = 0; r < R; ++r)
#pragma GCC unroll 16
        for (int v = 0; v < V; ++v)
          acc[r][v] = hn::Add(acc[r][v], hn::LoadU(d, c.plus.add + (row + r) * c.plus.add_stride + column + v * kLanes));
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 16
      for (int v = 0; v < V; ++v) hn::StoreU(acc[r][v], d, c.y + (row + r) * c.y_stride + column + v * kLanes);
  } else {
    HWY_ALIGN float sums[R][kPanels * kPanel];
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 16
      for (int v = 0; v < V; ++v) hn::Store(acc[r][v], d, sums[r] + v * kLanes);
    finish_last(c, row, R, column, columns, sums[0], kPanels * kPanel);
  }
}

template <int R, bool kBf16, int P = panels_at_once(R)>
void rows_of(const MatmulCall& c, std::int64_t panel, std::int64_t end, const float* xt, std::int64_t row) {
  for (; panel + P <= end; panel += P) tile<R, P, kBf16>(c, panel, xt, row);
  if constexpr (P > 1)
    if (panel < end) rows_of<R, kBf16, P / 2>(c, panel, end, xt, row);
}

template <int R = kMaxRows>
void block(int rows, const MatmulCall& c, std::int64_t panel, std::int64_t end, const float* xt, std::int64_t row) {
  if (rows == R) return c.bf16 ? rows_of<R, true>(c, panel, end, xt, row) : rows_of<R, false>(c, panel, end, xt, row);
  if constexpr (R > 1) block<R - 1>(rows, c, panel, end, xt, row);
}

/// xt[k][rows] from x[rows][k].
void transpose(const float* x, std::int64_t x_stride, std::int64_t rows, std::int64_t k, float* HWY_RESTRICT xt) {
  std::int64_t r = 0;
#if HWY_TARGET != HWY_SCALAR
  const hn::FixedTag<float, 4> d;
  const hn::Repartition<std::uint64_t, decltype(d)> pairs;
  const auto lower = [&](auto a, auto b)
                         HWY_ATTR { return hn::BitCast(d, hn::InterleaveLower(pairs, hn::BitCast(pairs, a), hn::BitCast(pairs, b))); };
  const auto upper = [&](auto a, auto b)
                         HWY_ATTR { return hn::BitCast(d, hn::InterleaveUpper(pairs, hn::BitCast(pairs, a), hn::BitCast(pairs, b))); };
  for (; r + 4 <= rows; r += 4) {
    const float* p = x + r * x_stride;
    std::int64_t i = 0;
    for (; i + 4 <= k; i += 4) {
      const auto a = hn::LoadU(d, p + i), b = hn::LoadU(d, p + x_stride + i);
      const auto c = hn::LoadU(d, p + 2 * x_stride + i), e = hn::LoadU(d, p + 3 * x_stride + i);
      const auto ab0 = hn::InterleaveLower(d, a, b), ab2 = hn::InterleaveUpper(d, a, b);
      const auto ce0 = hn::InterleaveLower(d, c, e), ce2 = hn::InterleaveUpper(d, c, e);
      float* to = xt + i * rows + r;
      hn::StoreU(lower(ab0, ce0), d, to);
      hn::StoreU(upper(ab0, ce0), d, to + rows);
      hn::StoreU(lower(ab2, ce2), d, to + 2 * rows);
      hn::StoreU(upper(ab2, ce2), d, to + 3 * rows);
    }
    for (; i < k; ++i)
      for (std::int64_t j = 0; j < 4; ++j) xt[i * rows + r + j] = p[j * x_stride + i];
  }
#endif
  for (; r < rows; ++r)
    for (std::int64_t i = 0; i < k; ++i) xt[i * rows + r] = x[r * x_stride + i];
}

/// Rows [row, row + rows), panels [begin, end). `scratch` holds rows * k floats; `packed` says that it has these rows already.
void matmul_piece(const MatmulCall& c, std::int64_t row, std::int64_t rows, std::int64_t begin, std::int64_t end, float* scratch,
                  bool packed) {
  const std::int64_t blocks = (rows + kMaxRows - 1) / kMaxRows;
  const auto first = [&](std::int64_t b) { return b * rows / blocks; };  // block sizes differ by one at most
  for (std::int64_t b = 0; b < blocks && !packed; ++b) {
    const std::int64_t r0 = first(b), count = first(b + 1) - r0;
    if (count > 1) transpose(c.x + (row + r0) * c.x_stride, c.x_stride, count, c.k, scratch + r0 * c.k);
  }
  for (std::int64_t p = begin; p < end; p += kGroup)
    for (std::int64_t b = 0; b < blocks; ++b) {
      const std::int64_t r0 = first(b), count = first(b + 1) - r0;
      const float* xt = count == 1 ? c.x + (row + r0) * c.x_stride : scratch + r0 * c.k;  // [k][1] is the row itself
      block(static_cast<int>(count), c, p, std::min(end, p + kGroup), xt, row + r0);
    }
}

}  // namespace specstate::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace specstate::cpu {

HWY_EXPORT(matmul_piece);

namespace {

constexpr std::int64_t kAlign = 64;

std::int64_t panel_bytes(std::int64_t k, DType dtype) { return dtype == DType::kBFloat16 ? (k + 1) / 2 * kPanel * 4 : k * kPanel * 4; }

/// Byte offset of element (row, col) in the packed form.
std::int64_t offset_of(std::int64_t row, std::int64_t col, std::int64_t k, DType dtype) {
  const std::int64_t panel = row / kPanel * panel_bytes(k, dtype), lane = row % kPanel;
  return dtype == DType::kBFloat16 ? panel + (col / 2 * kPanel + lane) * 4 + col % 2 * 2 : panel + (col * kPanel + lane) * 4;
}

}  // namespace

void PackedMatrix::Free::operator()(void* p) const { ::operator delete (p, std::align_val_t{kAlign}); }

std::int64_t PackedMatrix::bytes(std::int64_t n, std::int64_t k, DType dtype) { return (n + kPanel - 1) / kPanel * panel_bytes(k, dtype); }

PackedMatrix::PackedMatrix(std::int64_t n, std::int64_t k, DType dtype, void* memory) : data_(memory), n_(n), k_(k), dtype_(dtype) {
  if (dtype != DType::kBFloat16 && dtype != DType::kFloat32)
    throw Error(ErrorKind::kInternal,
                std::string("internal error: PackedMatrix: expected bfloat16 or float32, got ") + name_of(dtype) + ".");
  const auto size = static_cast<std::size_t>(bytes(n, k, dtype));
  if (!memory) {
    own_.reset(::operator new (std::max<std::size_t>(size, kAlign), std::align_val_t{kAlign}));
    data_ = own_.get();
  }
  std::memset(data_, 0, size);
}

PackedMatrix::PackedMatrix(const void* w, std::int64_t n, std::int64_t k, DType dtype, void* memory) : PackedMatrix(n, k, dtype, memory) {
  set_rows(0, n, w, k);
}

void PackedMatrix::set_rows(std::int64_t begin, std::int64_t count, const void* w, std::int64_t row_stride, std::int64_t col_stride) {
  // A few rows by a stretch of columns at a time, so that the lines of the panel are filled while they are in the cache.
  constexpr std::int64_t kStretch = 256;
  const auto copy = [&]<class T>(const T* source) {
    constexpr std::int64_t kStep = 4 / sizeof(T), kWord = kPanel * kStep;  // columns in a word of a lane; elements from word to word
    const std::int64_t first = begin / kPanel, last = (begin + count + kPanel - 1) / kPanel;
    parallel_for(last - first, std::max<std::int64_t>(1, 16384 / (k_ + 1)), [&](std::int64_t p0, std::int64_t p1) {
      for (std::int64_t p = first + p0; p < first + p1; ++p)
        for (std::int64_t c0 = 0; c0 < k_; c0 += kStretch)
          for (std::int64_t r = std::max(begin, p * kPanel); r < std::min(begin + count, (p + 1) * kPanel); ++r) {
            const T* from = source + (r - begin) * row_stride;
            T* to = reinterpret_cast<T*>(static_cast<std::uint8_t*>(data_) + offset_of(r, 0, k_, dtype_));
            for (std::int64_t i = c0; i < std::min(k_, c0 + kStretch); ++i) to[i / kStep * kWord + i % kStep] = from[i * col_stride];
          }
    });
  };
  dtype_ == DType::kBFloat16 ? copy(static_cast<const core::bfloat16*>(w)) : copy(static_cast<const float*>(w));
}

float PackedMatrix::at(std::int64_t row, std::int64_t col) const {
  const auto* p = static_cast<const std::uint8_t*>(data_) + offset_of(row, col, k_, dtype_);
  if (dtype_ == DType::kBFloat16) return core::to_float(*reinterpret_cast<const core::bfloat16*>(p));
  return *reinterpret_cast<const float*>(p);
}

void matmul(const PackedMatrix& w, const float* x, std::int64_t x_stride, std::int64_t rows, float* y, std::int64_t y_stride,
            const MatmulAdd& plus) {
  if (rows <= 0 || w.n() <= 0) return;
  const std::int64_t k = w.k();
  const MatmulCall call{static_cast<const std::uint8_t*>(w.data()),
                        panel_bytes(k, w.dtype()),
                        w.n(),
                        k,
                        w.dtype() == DType::kBFloat16,
                        x,
                        x_stride,
                        y,
                        y_stride,
                        plus};
  // A chunk of rows keeps its x in the second-level cache while the weights pass by once.
  constexpr std::int64_t kChunkFloats = 128 * 1024;
  const std::int64_t most = std::max<std::int64_t>(24, kChunkFloats / std::max<std::int64_t>(1, k) / 24 * 24);
  const std::int64_t chunks = (rows + most - 1) / most;
  const std::int64_t panels = (w.n() + kPanel - 1) / kPanel, units = (panels + kUnit - 1) / kUnit;
  // Pieces of at least 4 us, bound by 2-byte weights at 80 GB/s or by 100 GFLOP/s: handing one out costs about 2 us.
  const double nanoseconds =
      static_cast<double>(kUnit * kPanel * k) * std::max(2.0 / 80, static_cast<double>(rows) / static_cast<double>(chunks) * 2 / 100);
  const std::int64_t grain = static_cast<std::int64_t>(4000 / std::max(1.0, nanoseconds)) + 1;
  static std::atomic<std::uint64_t> calls{0};
  const std::uint64_t id = ++calls;
  parallel_for(chunks * units, grain, [&](std::int64_t begin, std::int64_t end) {
    struct Scratch {
      std::vector<float> x;
      std::uint64_t call = 0;
      std::int64_t chunk = 0;
    };
    thread_local Scratch scratch;
    while (begin < end) {
      const std::int64_t chunk = begin / units, u0 = begin % units, u1 = std::min(units, u0 + end - begin);
      const std::int64_t r0 = chunk * rows / chunks, r1 = (chunk + 1) * rows / chunks;
      const bool packed = scratch.call == id && scratch.chunk == chunk;
      if (r1 - r0 > 1 && scratch.x.size() < static_cast<std::size_t>((r1 - r0) * k))
        scratch.x.resize(static_cast<std::size_t>((r1 - r0) * k));
      HWY_DYNAMIC_DISPATCH(matmul_piece)(call, r0, r1 - r0, u0 * kUnit, std::min(panels, u1 * kUnit), scratch.x.data(), packed);
      scratch.call = id, scratch.chunk = chunk;
      begin += u1 - u0;
    }
  });
}

}  // namespace specstate::cpu
#endif
