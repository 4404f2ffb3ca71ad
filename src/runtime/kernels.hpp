#pragma once
// The attention kernels of the engine (row operations are in cpu/vector.hpp). All are row-invariant: a row's result depends on that row alone,
// and every sum over a row has one order. (Between instruction sets the order of sums differs, as in every SIMD code.)
#include <cstdint>

namespace specstate::runtime {

/// Positions in a block of index keys, see index_scores.
inline constexpr std::int64_t kKeyBlock = 16;

/// scores[p] = sum_h weights[h] * relu(q[h] . key[p]) + 0 (a -0 becomes +0, so that equal scores compare equal), p < n.
/// keys: bfloat16 in blocks of 16 positions, [ceil(n / 16)][dim][16]; scores must have room for whole blocks.
void index_scores(const std::uint16_t* keys, std::int64_t n, std::int64_t dim, const float* q, const float* weights, std::int64_t heads,
                  float* scores);

/// Softmax attention of `heads` queries [heads][width] (already scaled) over n bfloat16 rows of `width` values, in the given order;
/// out[h] [value_width] = sum_p softmax_p * rows[p][0 .. value_width). `scratch` has latent_scratch(n, width) floats.
void latent_attention(const std::uint16_t* const* rows, std::int64_t n, std::int64_t width, std::int64_t value_width, const float* q,
                      std::int64_t heads, float* out, float* scratch);
std::int64_t latent_scratch(std::int64_t n, std::int64_t width);

/// Softmax attention of nq queries (already scaled) over n keys; query i sees keys from first[i] on. q, out [nq][dim] with row strides;
/// v [n][dim] dense; k in blocks of 16 keys, [ceil(n / 16)][dim][16]. `scratch` has block_scratch(nq, n) floats.
void block_attention(const float* q, std::int64_t q_stride, std::int64_t nq, const float* k, const float* v, std::int64_t n,
                     const std::int64_t* first, std::int64_t dim, float* out, std::int64_t out_stride, float* scratch);
std::int64_t block_scratch(std::int64_t nq, std::int64_t n);

}  // namespace specstate::runtime
