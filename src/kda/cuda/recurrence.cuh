#pragma once
// The one recurrence of verify (exact ring mode and snapshots), decode and fold.
//
// 16 lanes hold R value rows of a head's state in registers: lane l has channels 4l..4l+3 (and, for K = 128, 64+4l..64+4l+3) of each.
// Eight warps of two such groups make 16 R rows of a CTA. A token's k, q and decay are read from shared memory once for R rows.
//
// Every row's sum over K runs as: each lane's channels in order by multiply-adds, then lanes 8, 4, 2 and 1 apart. That order is the
// same for every R, so the bits of a row do not depend on how many rows a lane holds nor on how a head is cut among CTAs.
//
// The sums of R rows (p = S.k, and r = S.q) are taken together: at each of the steps 8, 4, 2 a lane keeps one half of its rows and
// gives the other away, so 2R sums cost 2R - 1 shuffles instead of 8R, and lane l ends with the sum of one row, `row_of(l)`. For that
// register i of a lane holds row i XOR row_of(l): then "the half to keep" has the same register numbers in every lane. The step 1
// apart joins p and r: even lanes end with p, odd lanes with r.
#include "cuda/ptx.cuh"
#include "kda/cuda/device.cuh"

namespace specstate::kda::cuda {

constexpr int kWarps = 8, kThreads = 32 * kWarps;
constexpr int kRowUnit = 16;  // value rows of a CTA for each row a lane holds

/// Row (of R) whose sum lane l of 16 gets.
template <int R>
__device__ __forceinline__ int row_of(int l) {
  return R == 8 ? l >> 1 : R == 4 ? l >> 2 : R == 2 ? l >> 3 : 0;
}

template <int K, int R>
struct Rows {
  static constexpr int kChannels = K / 16;  // of a lane, in quads
  float s[R][kChannels];
};

/// The channels of a lane from a row in shared memory.
template <int K>
__device__ __forceinline__ void channels(const float* row, int l, float (&x)[K / 16]) {
#pragma unroll
  for (int j = 0; j < K / 64; ++j) {
    const float4 v = *reinterpret_cast<const float4*>(row + 64 * j + 4 * l);
    x[4 * j] = v.x, x[4 * j + 1] = v.y, x[4 * j + 2] = v.z, x[4 * j + 3] = v.w;
  }
}

template <int K>
__device__ __forceinline__ void channels(const bfloat16* row, int l, float (&x)[K / 16]) {
#pragma unroll
  for (int j = 0; j < K / 64; ++j) {
    float y[4];
    unpack(*reinterpret_cast<const Quad<bfloat16>*>(row + 64 * j + 4 * l), y);
#pragma unroll
    for (int e = 0; e < 4; ++e) x[4 * j + e] = y[e];
  }
}

/// Sums over the 16 lanes; see above. Without r all lanes of a row get p.
template <int R, bool kOut>
__device__ __forceinline__ float row_sums(float (&p)[R], float (&r)[R], int lane) {
  int distance = 8;
#pragma unroll
  for (int half = R / 2; half > 0; half /= 2, distance /= 2)
#pragma unroll
    for (int i = 0; i < half; ++i) {
      p[i] += __shfl_xor_sync(kAll, p[i + half], distance);
      if (kOut) r[i] += __shfl_xor_sync(kAll, r[i + half], distance);
    }
#pragma unroll
  for (; distance > 1; distance /= 2) {
    p[0] += __shfl_xor_sync(kAll, p[0], distance);
    if (kOut) r[0] += __shfl_xor_sync(kAll, r[0], distance);
  }
  if (!kOut) return p[0] + __shfl_xor_sync(kAll, p[0], 1);
  const bool odd = lane & 1;
  const float keep = odd ? r[0] : p[0], give = odd ? p[0] : r[0];
  return keep + __shfl_xor_sync(kAll, give, 1);
}

/// u of a row from the lane that has it, to all lanes' register i.
template <int R>
__device__ __forceinline__ float u_of(float u, int i, int lane) {
  constexpr int kCopies = 16 / R;
  return __shfl_sync(kAll, u, (lane & 16) + (i ^ row_of<R>(lane & 15)) * kCopies);
}

/// What one token needs of the recurrence, all in shared memory.
template <class Key>
struct StepOf {
  const Key *k, *q;  // [K], without their norms
  const float* decay;
  float v;                 // of the lane's row
  float beta, fk, fq, kq;  // fk, fq: the norms' factors; kq: of the normalised k and q
};
using Step = StepOf<float>;

/// S *= decay; u = (v - S.k) * beta; S += u k, for the normalised k. Returns u in even lanes and, with kOut, o = S.q of the updated state
/// in odd ones, each of the lane's row. `update` false leaves S without the last line.
template <int K, int R, bool kOut, bool kRound, class Key>
__device__ __forceinline__ float advance(Rows<K, R>& x, const StepOf<Key>& t, int lane, bool update) {
  constexpr int C = K / 16;
  const int l = lane & 15;
  float k[C], p[R], r[R];
  {
    float d[C];
    channels<K>(t.decay, l, d);
    channels<K>(t.k, l, k);
#pragma unroll
    for (int i = 0; i < R; ++i) {
      p[i] = 0, r[i] = 0;
#pragma unroll
      for (int c = 0; c < C; ++c) {
        x.s[i][c] *= d[c];
        p[i] = fmaf(x.s[i][c], k[c], p[i]);
      }
    }
  }
  if (kOut) {
    float q[C];
    channels<K>(t.q, l, q);
#pragma unroll
    for (int i = 0; i < R; ++i)
#pragma unroll
      for (int c = 0; c < C; ++c) r[i] = fmaf(x.s[i][c], q[c], r[i]);
  }
  const float sum = row_sums<R, kOut>(p, r, lane) * (kOut && (lane & 1) ? t.fq : t.fk);
  const float u = (t.v - sum) * t.beta;  // in odd lanes of kOut: of r, and not used
  float result = u;
  if (kOut) {
    const float mine = __shfl_xor_sync(kAll, u, 1);
    if (lane & 1) result = fmaf(mine, t.kq, sum);
  }
  if (update) {
    const float scaled = u * t.fk;
#pragma unroll
    for (int i = 0; i < R; ++i) {
      const float ui = u_of<R>(scaled, i, lane);
#pragma unroll
      for (int c = 0; c < C; ++c) x.s[i][c] = fmaf(ui, k[c], x.s[i][c]);
      if (kRound) round_bf16(x.s[i]);
    }
  }
  return result;
}

/// The update alone, for a token whose u is known: the same operations as `advance`.
template <int K, int R, bool kRound>
__device__ __forceinline__ void replay(Rows<K, R>& x, const float* decay, const float* key, float fk, const float* u_rows, int lane) {
  constexpr int C = K / 16;
  const int l = lane & 15;
  float d[C], k[C];
  channels<K>(decay, l, d);
  channels<K>(key, l, k);
#pragma unroll
  for (int i = 0; i < R; ++i) {
    const float u = u_rows[i ^ row_of<R>(l)] * fk;
#pragma unroll
    for (int c = 0; c < C; ++c) x.s[i][c] = fmaf(u, k[c], x.s[i][c] * d[c]);
    if (kRound) round_bf16(x.s[i]);
  }
}

// ---- the state in memory -----------------------------------------------------------------------------------------------------

/// First of a lane group's rows within the CTA.
template <int R>
__device__ __forceinline__ int group_row() {
  return (static_cast<int>(threadIdx.x) / 16) * R;
}

/// A warp's own rows into shared memory; the warp alone reads them, after `wait_copies` and `__syncwarp`. `from` is the CTA's first row.
/// A bfloat16 slot may start on a multiple of 8 bytes only.
template <int K, int R, class S, int kBytes = 16>
__device__ __forceinline__ void fetch_rows(const S* from, S* to) {
  if (kBytes == 16 && sizeof(S) == 2 && reinterpret_cast<std::uintptr_t>(from) % 16 != 0) return fetch_rows<K, R, S, 8>(from, to);
  constexpr int kPiece = kBytes / static_cast<int>(sizeof(S)), kPieces = 2 * R * K / kPiece;
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  const std::int64_t first = static_cast<std::int64_t>(warp) * 2 * R * K;
#pragma unroll
  for (int i = 0; i < (kPieces + 31) / 32; ++i) {
    const int piece = i * 32 + lane;
    if (kPieces % 32 == 0 || piece < kPieces) copy_async<kBytes>(to + first + piece * kPiece, from + first + piece * kPiece);
  }
}

/// The same by one bulk copy, which arrives at the warp's own `barrier`. `from` and `to` as above, multiples of 16 bytes.
template <int K, int R, class S>
__device__ __forceinline__ void bulk_rows(const S* from, S* to, std::uint64_t* barrier, int lane) {
#if __CUDA_ARCH__ >= 900
  constexpr std::uint32_t kBytes = 2 * R * K * sizeof(S);
  const int first = static_cast<int>(threadIdx.x) / 32 * 2 * R * K;
  specstate::cuda::ptx::fence_async();  // what threads wrote there comes before what is copied there
  __syncwarp();
  if (lane == 0) {
    specstate::cuda::ptx::barrier_expect(barrier, kBytes);
    specstate::cuda::ptx::bulk_load(to + first, from + first, kBytes, barrier);
  }
#endif
}

template <int K, int R, class S>
__device__ __forceinline__ void load_rows(Rows<K, R>& x, const S* shared, int lane) {
  const int l = lane & 15;
#pragma unroll
  for (int i = 0; i < R; ++i) {
    const S* row = shared + (group_row<R>() + (i ^ row_of<R>(l))) * K;
#pragma unroll
    for (int j = 0; j < K / 64; ++j) {
      const Quad<S> q = *reinterpret_cast<const Quad<S>*>(row + 64 * j + 4 * l);  // as a whole
      float y[4];
      unpack(q, y);
#pragma unroll
      for (int e = 0; e < 4; ++e) x.s[i][4 * j + e] = y[e];
    }
  }
}

template <int K, int R>
__device__ __forceinline__ void clear_rows(Rows<K, R>& x) {
#pragma unroll
  for (int i = 0; i < R; ++i)
#pragma unroll
    for (int c = 0; c < K / 16; ++c) x.s[i][c] = 0;
}

/// To the CTA's first row in memory, straight from registers: 32 bytes of eight rows at a time. `vec`: quads as a whole.
template <int K, int R, class S>
__device__ __forceinline__ void scatter_rows(const Rows<K, R>& x, S* to, bool vec, int lane) {
  const int l = lane & 15;
#pragma unroll
  for (int i = 0; i < R; ++i) {
    S* row = to + static_cast<std::int64_t>(group_row<R>() + (i ^ row_of<R>(l))) * K;
#pragma unroll
    for (int j = 0; j < K / 64; ++j) {
      const float y[4] = {x.s[i][4 * j], x.s[i][4 * j + 1], x.s[i][4 * j + 2], x.s[i][4 * j + 3]};
      Quad<S> q;
      pack(y, q);
      S* p = row + 64 * j + 4 * l;
      if (vec) {
        *reinterpret_cast<Quad<S>*>(p) = q;
      } else {
#pragma unroll
        for (int e = 0; e < 4; ++e) assign(p[e], element(q, e));
      }
    }
  }
}

/// Until the copy engine has read what the warp gave it.
__device__ __forceinline__ void stores_read(int lane) {
#if __CUDA_ARCH__ >= 900
  if (lane == 0) specstate::cuda::ptx::bulk_wait_read<0>();
  __syncwarp();
#endif
}
/// Until it is written.
__device__ __forceinline__ void stores_done(int lane) {
#if __CUDA_ARCH__ >= 900
  if (lane == 0) specstate::cuda::ptx::bulk_wait<0>();
#endif
}

/// The same through `shared` (the CTA's rows; a warp uses its own): whole rows leave, by the copy engine where there is one. The place
/// is free again after `stores_read`.
template <int K, int R, class S>
__device__ __forceinline__ void store_rows(const Rows<K, R>& x, S* to, S* shared, bool vec, int lane) {
#if __CUDA_ARCH__ >= 900 && !defined(KDA_DIRECT)
  if (reinterpret_cast<std::uintptr_t>(to) % 16 == 0) {
    stores_read(lane);
    scatter_rows(x, shared, true, lane);
    specstate::cuda::ptx::fence_async();
    __syncwarp();
    const int first = static_cast<int>(threadIdx.x) / 32 * 2 * R * K;
    if (lane == 0) {
      specstate::cuda::ptx::bulk_store(to + first, shared + first, 2 * R * K * sizeof(S));
      specstate::cuda::ptx::bulk_commit();
    }
    return;
  }
#endif
  scatter_rows(x, to, vec, lane);
}

}  // namespace specstate::kda::cuda
