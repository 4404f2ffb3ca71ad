#pragma once
// The model's own kernels: everything of a step that no family does. Each is a function on raw device pointers that enqueues one launch.
//
// Arithmetic is the CPU engine's, sum by sum (cpu/vector.hpp, cpu/matmul.hpp): a row's result has one order of sums, whatever rows are beside
// it, and most results have the CPU's very bits. The two attentions sum in an order of their own.
#include <cstdint>
#include <vector>

#include "cpu/matmul.hpp"
#include "cuda/cublaslt.hpp"
#include "runtime/cuda/group.hpp"
#include "specstate/stream.hpp"

namespace specstate::runtime::cuda {

class Memory;

/// A packed matrix [n, k] in device memory, bfloat16, in the layout of cpu::PackedMatrix: panels of 16 outputs, two successive k in a word.
struct Matrix {
  const std::uint32_t* words = nullptr;
  std::int64_t n = 0, k = 0;
  /// Where the bits need not be plain decoding's: the same as dense float32, and who multiplies it.
  const float* dense = nullptr;
  specstate::cuda::CublasLt* lt = nullptr;
  /// These are a rank's outputs of a matrix with n = `whole`: a product computes them and gets the others from the other ranks.
  const Exchange* split = nullptr;
  std::int64_t whole = 0;
};
Matrix upload(Memory& memory, const cpu::PackedMatrix& matrix, specstate::cuda::CublasLt* lt = nullptr);
/// Only the outputs in `rows`, one run behind the other: another matrix.
Matrix upload_rows(Memory& memory, const cpu::PackedMatrix& matrix, const std::vector<Part>& rows, specstate::cuda::CublasLt* lt);
/// Split by outputs where there is a group.
Matrix upload_split(Memory& memory, const cpu::PackedMatrix& matrix, const Exchange& exchange, specstate::cuda::CublasLt* lt);

/// What a product reads: rows of x, rows of rms_norm(x), or of swiglu(x) (x then has 2k columns). The last two are computed where the product stages
/// its rows, by every block for itself: a launch costs more than that. `room` [rows, k] is for products that cannot (cuBLASLt's).
struct Input {
  const float* x = nullptr;
  std::int64_t stride = 0;
  enum class As : std::uint8_t { kPlain, kNormed, kSwiglu } as = As::kPlain;
  const float* norm = nullptr;
  float eps = 0;
  float* room = nullptr;
};
inline Input plain(const float* x, std::int64_t stride) { return {x, stride, Input::As::kPlain, nullptr, 0, nullptr}; }
inline Input normed(const float* x, std::int64_t stride, const float* norm, float eps, float* room) {
  return {x, stride, Input::As::kNormed, norm, eps, room};
}
inline Input swiglu_of(const float* x, std::int64_t stride, float* room) { return {x, stride, Input::As::kSwiglu, nullptr, 0, room}; }

/// A second place for a product's rows.
struct Also {
  float* y = nullptr;
  std::int64_t stride = 0;
};
/// y [rows, n] = input [rows, k] w^T (+ add, which may be y): one chain of multiply-adds over rising k an output, as on the CPU; or cuBLASLt's product,
/// where w has it and `add` is nothing or y.
/// Of a split w all ranks' outputs (`add` must be y or nothing).
void matmul(const Matrix& w, const Input& input, std::int64_t rows, float* y, std::int64_t y_stride, Stream stream,
            const float* add = nullptr, const Also& also = {});
/// The same for matrices of one shape, head h at x + h x_step and y + h y_step.
void matmul_heads(const std::vector<Matrix>& w, const float* x, std::int64_t x_stride, std::int64_t x_step, std::int64_t rows, float* y,
                  std::int64_t y_stride, std::int64_t y_step, Stream stream);

/// to [rows, units unit] (= or, where `add`, +=) what the ranks have side by side: each the columns of its part of the `units`, dense at `mine`.
void gather_columns(const Exchange& exchange, const float* mine, std::int64_t rows, std::int64_t units, std::int64_t unit, float* to,
                    std::int64_t to_stride, bool add, Stream stream);
/// values[0..n) = the sums over the ranks; room [size, n].
void sum_over_ranks(Group& group, std::uint64_t* values, std::int64_t n, std::uint64_t* room, Stream stream);

/// x [rows, d] += down swiglu(gate_up h): gate_up has this rank's columns of both halves of F, `down` is split by outputs where there is a group.
void mlp(const Matrix& gate_up, const Matrix& down, const Input& h, std::int64_t rows, std::int64_t F, float* wide, float* act, float* x,
         std::int64_t d, const Exchange& exchange, Stream stream, const Also& also = {});

/// The rows of a forward: `batch` windows of `width` rows each; only the first *real windows count.
struct Rows {
  std::int64_t batch = 0, width = 0;
  const std::int32_t* real = nullptr;       // [1]
  const std::int32_t* requests = nullptr;   // [batch] row of the tables
  const std::int32_t* positions = nullptr;  // [batch, width]
  const std::int64_t* tokens = nullptr;     // [batch, width]
  constexpr std::int64_t count() const { return batch * width; }
};

/// x [rows, d] = table [ids[row]].
void embed(const float* table, std::int64_t d, const std::int64_t* ids, std::int64_t rows, float* x, Stream stream);
/// y = x / sqrt(mean(x^2) + eps) * w, row by row.
void rms_norm(const float* x, std::int64_t x_stride, std::int64_t rows, std::int64_t n, const float* w, float eps, float* y,
              std::int64_t y_stride, Stream stream);
/// act [rows, F] = silu(wide[:, :F]) * wide[:, F:].
void swiglu(const float* wide, std::int64_t rows, std::int64_t F, float* act, Stream stream);
/// to [rows, d] with row strides.
void copy_columns(const float* from, std::int64_t from_stride, std::int64_t rows, std::int64_t d, float* to, std::int64_t to_stride,
                  Stream stream);

// ---- sparse MLA ----------------------------------------------------------------------------------------------------------------------

/// The cached row of each window row: [rms(first C of kv, norm), the other Dr] as bfloat16, to row locs[row] of `to` (none if < 0).
struct Latent {
  const float* kv = nullptr;
  std::int64_t stride = 0, C = 0, Dr = 0;
  const float* norm = nullptr;
  float eps = 0;
  const std::int32_t* locs = nullptr;
  std::uint16_t* to = nullptr;
};
/// Index keys: layernorm(x) as bfloat16 to `to` [R, L, dim] at each row's request and position. x null: none.
struct IndexKeys {
  const float* x = nullptr;
  std::int64_t stride = 0, dim = 0;
  const float *w = nullptr, *b = nullptr;
  std::int64_t L = 0;
  std::uint16_t* to = nullptr;
};
void store_rows(const Rows& rows, const Latent& latent, const IndexKeys& keys, Stream stream);
/// Rows [from_row, from_row + n) of one buffer to rows locs[0..n) of another, `width` bfloat16 each.
void scatter_rows(const std::uint16_t* from, std::int64_t n, std::int64_t width, const std::int32_t* locs, std::uint16_t* to,
                  Stream stream);
/// The indexer's choice: the K best of the positions up to a row's own, rising, ties to the lower, -1 behind them. q [Hi, Di] and, `weights` floats
/// behind q's row, Hi weights that `scale` multiplies. scores [rows, L] is working memory.
void select(const Rows& rows, const float* q, std::int64_t stride, std::int64_t weights, std::int64_t Hi, std::int64_t Di, float scale,
            const std::uint16_t* keys, std::int64_t L, std::int64_t K, float* scores, std::int32_t* selected, Stream stream);
/// Softmax attention of each row and head over the rows locs[row, 0..K) (< 0: none) of `latent`: out [rows, Hm, C]. The query of head h is [up [rows, Hm, C],
/// Dr values at rope + h rope_step] * scale. A row that was selected (>= 0) and lies nowhere sets *fault.
void latent_attention(const Rows& rows, const std::int32_t* selected, const std::int32_t* locs, std::int64_t K, const std::uint16_t* latent,
                      const float* up, const float* rope, std::int64_t rope_stride, std::int64_t rope_step, std::int64_t Hm, std::int64_t C,
                      std::int64_t Dr, float scale, float* out, std::int32_t* fault, Stream stream);

// ---- drafting --------------------------------------------------------------------------------------------------------------------------

/// x [batch, block, d] = the embeddings of each request's last token, then masks.
void embed_block(const Rows& rows, std::int64_t block, const std::int32_t* last, std::int64_t mask, const float* table, std::int64_t d,
                 float* x, Stream stream);
/// What becomes of a block's queries and keys: norm per head, rotary at the absolute position (table [positions, dim]), queries scaled.
struct Rotary {
  const float *q_norm = nullptr, *k_norm = nullptr;
  float eps = 0;
  const float* table = nullptr;
  std::int64_t dim = 0;
  float scale = 1;
};
/// Row j of a block at position n + j: softmax over the context's pool rows request * pool_step + p, p < n, and the block's own keys; a key at kp
/// is seen iff kp > n + j - window (0: always).
void block_attention(const Rows& rows, std::int64_t block, const float* qkv, std::int64_t stride, std::int64_t heads, std::int64_t kv_heads,
                     std::int64_t D, const Rotary& rotary, std::int64_t window, std::int64_t L, const std::uint16_t* k_pool,
                     const std::uint16_t* v_pool, std::int64_t pool_step, float* out, Stream stream);

// ---- tokens ----------------------------------------------------------------------------------------------------------------------------

/// How ids are chosen from logits (runtime/sampler.hpp, the same numbers).
struct Choice {
  std::int64_t V = 0;
  int eos = 0;
  double temperature = 0;  // 0: the best id
  std::uint64_t seed = 0;
};
/// One row of the target's logits a window row: its id to out [rows]; with `probabilities` [rows, V], these instead, and the uniforms of acceptance.
void choose(const Rows& rows, const float* logits, const Choice& choice, const std::uint64_t* keys, std::int64_t* out,
            double* probabilities, double* uniforms, Stream stream);
/// The proposals of each request, of rows skip.. of its block's logits [batch, block, V], to candidates [batch, width] columns 1..; DSpark adds
/// proj . embed[the token before] to each. `probabilities` [batch, block - skip, V]: proposals are drawn.
struct Markov {
  const float* embed = nullptr;  // [V, rank]; null: none
  Matrix proj;
};
void propose(const Rows& rows, std::int64_t block, std::int64_t skip, const float* logits, const Choice& choice, const std::uint64_t* keys,
             const Markov& markov, std::int64_t* candidates, double* probabilities, Stream stream);

// ---- the step ----------------------------------------------------------------------------------------------------------------------------

/// What the device knows of each request, [R].
struct Tables {
  std::int32_t *lengths = nullptr, *last = nullptr,
               *left = nullptr;   // committed tokens; last emitted one, in no state yet; may still be emitted
  std::uint64_t* keys = nullptr;  // the request's name among the uniforms
  std::int32_t* fault = nullptr;  // [1]
};
/// Arrays of one step, for up to `batch` requests of `width` rows.
struct Step {
  std::int64_t batch = 0, width = 0;
  std::int32_t* slots = nullptr;  // [batch] in: requests that may be active, -1 none
  std::int32_t *real = nullptr, *requests = nullptr, *kda_slots = nullptr, *widths = nullptr, *caps = nullptr;  // [1], [batch] ...
  std::int32_t *positions = nullptr, *ends = nullptr, *locs = nullptr;                                          // [batch, width]
  std::int64_t *candidates = nullptr, *target = nullptr, *out = nullptr;                                        // [batch, width]
  std::int64_t* pool_rows = nullptr;                                          // [batch, width] request * context + position
  std::int32_t *accept = nullptr, *accepted = nullptr, *last_step = nullptr;  // [batch]
  Rows rows() const { return {batch, width, real, requests, positions, candidates}; }
};
/// The requests that still have tokens to emit come first; their windows; column 0 of the candidates.
void begin(const Step& step, const Tables& tables, std::int64_t context, Stream stream);

/// Forced acceptance of `length` tokens a step: plain decoding's tokens of all prompts, each run as long as its prompt may emit (zeros behind an end).
struct Forced {
  std::int32_t length = 0;  // 0: none
  const std::int32_t* known = nullptr;
  std::int64_t* ends = nullptr;  // [R] where the run of a request's prompt ends
};
/// The first length - 1 proposals become right, the next one wrong.
void force(const Step& step, const Tables& tables, const Forced& forced, Stream stream);

/// What the host reads behind a step, in pinned memory: a ring of `entries` records, written one after the other.
struct Emitted {
  std::int32_t *count = nullptr, *request = nullptr, *tokens = nullptr;  // [entries, batch], the same, [entries, batch, width]
  std::int32_t* fault = nullptr;                                         // [entries]
  std::int64_t entries = 0, batch = 0, width = 0;
  std::int32_t* written = nullptr;  // [1], device: records so far
};
/// What the swaps of a step found.
struct Swaps {
  std::int64_t anchors = 0, most = 0;
  const std::int32_t *hits = nullptr, *misses = nullptr;
  std::int64_t* totals = nullptr;
};
/// Cuts what was accepted at an EOS, keeps the last token and what is left, and publishes: accepted [batch] are the rows that stand.
/// And adds up: totals [anchors, 2] += hits and misses [anchors, most] of the step's requests.
void emit(const Step& step, const Tables& tables, int eos, const Emitted& emitted, const Swaps& swaps, Stream stream);

// ---- comparing -------------------------------------------------------------------------------------------------------------------------

/// digest[r] += a hash of request r's words [count] (of 4 bytes) at base + r * step words; lengths given: count words a committed position.
void add_digest(const void* base, std::int64_t step, std::int64_t count, const std::int32_t* lengths, std::int64_t requests,
                std::uint64_t salt, std::uint64_t* digest, Stream stream);

}  // namespace specstate::runtime::cuda
