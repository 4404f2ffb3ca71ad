#pragma once
// What KDA's kernels share below the recurrence: four channels at a time in and out of memory, the activation functions.
//
// A lane owns four neighbouring channels ("quad"). Rows of a head start on a multiple of four elements in every ordinary tensor, so a
// quad is one 8- or 16-byte access; where a view's pointer or strides forbid that (`vec` false) it is four scalar ones, in forms of the
// kernels of their own (kVec false).
#include <cstdint>

#include "core/numeric.hpp"
#include "kda/args.hpp"
#include "kda/layout.hpp"

namespace specstate::kda::cuda {

using core::bfloat16;

constexpr unsigned kAll = 0xFFFFFFFFu;

/// Four values as 32-bit words: halves of a register each cost one.
template <class T>
struct Quad;
template <>
struct alignas(16) Quad<float> {
  std::uint32_t w[4];
};
template <>
struct alignas(8) Quad<bfloat16> {
  std::uint32_t w[2];
};

// ---- arithmetic --------------------------------------------------------------------------------------------------------------

/// Two floats to bfloat16, nearest even.
__device__ __forceinline__ std::uint32_t pack_bf16(float low, float high) {
  std::uint32_t r;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
  return r;
}
__device__ __forceinline__ float low_bf16(std::uint32_t x) { return __uint_as_float(x << 16); }
__device__ __forceinline__ float high_bf16(std::uint32_t x) { return __uint_as_float(x & 0xFFFF0000u); }

/// n values (even) as a bfloat16 pool holds them.
template <int N>
__device__ __forceinline__ void round_bf16(float (&x)[N]) {
#pragma unroll
  for (int i = 0; i < N; i += 2) {
    const std::uint32_t r = pack_bf16(x[i], x[i + 1]);
    x[i] = low_bf16(r), x[i + 1] = high_bf16(r);
  }
}

__device__ __forceinline__ void unpack(const Quad<float>& q, float (&y)[4]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) y[i] = __uint_as_float(q.w[i]);
}
__device__ __forceinline__ void unpack(const Quad<bfloat16>& q, float (&y)[4]) {
  y[0] = low_bf16(q.w[0]), y[1] = high_bf16(q.w[0]), y[2] = low_bf16(q.w[1]), y[3] = high_bf16(q.w[1]);
}
__device__ __forceinline__ void pack(const float (&y)[4], Quad<float>& q) {
#pragma unroll
  for (int i = 0; i < 4; ++i) q.w[i] = __float_as_uint(y[i]);
}
__device__ __forceinline__ void pack(const float (&y)[4], Quad<bfloat16>& q) {
  q.w[0] = pack_bf16(y[0], y[1]), q.w[1] = pack_bf16(y[2], y[3]);
}

/// Element i, as bits.
__device__ __forceinline__ std::uint32_t element(const Quad<float>& q, int i) { return q.w[i]; }
__device__ __forceinline__ std::uint32_t element(const Quad<bfloat16>& q, int i) { return i % 2 ? q.w[i / 2] >> 16 : q.w[i / 2] & 0xFFFFu; }
__device__ __forceinline__ void set_element(Quad<float>& q, int i, std::uint32_t x) { q.w[i] = x; }
__device__ __forceinline__ void set_element(Quad<bfloat16>& q, int i, std::uint32_t x) {
  q.w[i / 2] = i % 2 ? (q.w[i / 2] & 0xFFFFu) | x << 16 : (q.w[i / 2] & 0xFFFF0000u) | (x & 0xFFFFu);
}
__device__ __forceinline__ std::uint32_t bits(float x) { return __float_as_uint(x); }
__device__ __forceinline__ std::uint32_t bits(bfloat16 x) { return x.bits; }
__device__ __forceinline__ void assign(float& to, std::uint32_t x) { to = __uint_as_float(x); }
__device__ __forceinline__ void assign(bfloat16& to, std::uint32_t x) { to.bits = static_cast<std::uint16_t>(x); }

/// 1 / x within one unit in the last place.
__device__ __forceinline__ float reciprocal(float x) {
  float r;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
  return r;
}
__device__ __forceinline__ float exp2_of(float x) {
  float r;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
  return r;
}
/// e^x, two units also for large |x|: what is lost in x log2(e) comes back as a factor. NaN stays NaN; beyond +-87 the ends of the range.
__device__ __forceinline__ float exp_of(float x) {
  asm("max.NaN.f32 %0, %0, 0fC2AE0000;" : "+f"(x));  // -87
  asm("min.NaN.f32 %0, %0, 0f42B00000;" : "+f"(x));  // 88
  const float t = x * 1.44269502f, lost = fmaf(x, 1.92596303e-8f, fmaf(x, 1.44269502f, -t));
  const float e = exp2_of(t);
  return fmaf(e * 0.693147182f, lost, e);
}
__device__ __forceinline__ float sigmoid(float x) { return reciprocal(1.0f + exp_of(-x)); }
/// The same within 1e-6 for |x| up to 10, for values that are rounded to bfloat16 or multiply one that is.
__device__ __forceinline__ float quick_sigmoid(float x) { return reciprocal(1.0f + exp2_of(x * -1.44269502f)); }

__device__ __forceinline__ float inverse_norm(float sum) { return rsqrtf(sum + 1e-6f); }

/// exp(a_log), kept finite so that it times a vanished softplus is 0 and not NaN.
__device__ __forceinline__ float amplitude_of(float a_log) { return fminf(expf(a_log), 3.402823466e38f); }

/// log(1 + e^y) = max(y, 0) + 2 atanh(s), s = e / (2 + e) with e = e^-|y|: a short series, since s <= 1/3.
__device__ __forceinline__ float softplus(float y) {
  const float e = exp_of(-fabsf(y)), s = e * reciprocal(2.0f + e), s2 = s * s;
  float p = 2.0f / 15.0f;
  p = fmaf(p, s2, 2.0f / 13.0f);
  p = fmaf(p, s2, 2.0f / 11.0f);
  p = fmaf(p, s2, 2.0f / 9.0f);
  p = fmaf(p, s2, 2.0f / 7.0f);
  p = fmaf(p, s2, 2.0f / 5.0f);
  p = fmaf(p, s2, 2.0f / 3.0f);
  p = fmaf(p, s2, 2.0f);
  return fmaf(p, s, fmaxf(y, 0.0f));
}

struct Gate {
  bool safe;
  float lower_bound, softplus_beta, inverse_beta, softplus_threshold, amplitude;

  __device__ __forceinline__ float log_decay(float x) const {
    if (safe) return lower_bound * sigmoid(amplitude * x);
    const float y = x * softplus_beta;
    return -(amplitude * (y > softplus_threshold || x != x ? x : softplus(y) * inverse_beta));
  }
};

// ---- memory ------------------------------------------------------------------------------------------------------------------

template <class T, bool kVec>
__device__ __forceinline__ Quad<T> load_quad(const Array& t, std::int64_t offset) {
  const T* p = static_cast<const T*>(t.data) + offset;
  if (kVec || t.vec) return *reinterpret_cast<const Quad<T>*>(p);
  Quad<T> q = {};
#pragma unroll
  for (int i = 0; i < 4; ++i) set_element(q, i, bits(p[i]));
  return q;
}
template <bool kVec, class T>
__device__ __forceinline__ void store_quad(const Array& t, std::int64_t offset, const Quad<T>& q) {
  T* p = static_cast<T*>(t.data) + offset;
  if (kVec || t.vec) {
    *reinterpret_cast<Quad<T>*>(p) = q;
  } else {
#pragma unroll
    for (int i = 0; i < 4; ++i) assign(p[i], element(q, i));
  }
}
/// Four values of a tensor that may be of either storage type.
template <bool kVec>
__device__ __forceinline__ void load_values(const Array& t, std::int64_t offset, float (&y)[4]) {
  if (t.bf16)
    unpack(load_quad<bfloat16, kVec>(t, offset), y);
  else
    unpack(load_quad<float, kVec>(t, offset), y);
}

/// The three inputs of a conv window of four channels, oldest first. `offset` is that of the first channel, tap 0.
template <class T>
__device__ __forceinline__ void load_window(const Array& t, std::int64_t offset, std::int64_t channel, std::int64_t tap, Quad<T> (&x)[3]) {
  const T* p = static_cast<const T*>(t.data) + offset;
  if (t.vec && t.layout == Array::kTapRows) {
#pragma unroll
    for (int i = 0; i < 3; ++i) x[i] = *reinterpret_cast<const Quad<T>*>(p + i * tap);
  } else if (t.vec) {
    Quad<T> flat[3];
#pragma unroll
    for (int i = 0; i < 3; ++i) flat[i] = reinterpret_cast<const Quad<T>*>(p)[i];
#pragma unroll
    for (int i = 0; i < 12; ++i) set_element(x[i % 3], i / 3, element(flat[i / 4], i % 4));
  } else {
#pragma unroll
    for (int i = 0; i < 12; ++i) set_element(x[i % 3], i / 3, bits(p[(i / 3) * channel + (i % 3) * tap]));
  }
}
/// kRows: the channels of a tap are known to be dense.
template <bool kRows, class T>
__device__ __forceinline__ void store_window(const Array& t, std::int64_t offset, std::int64_t channel, std::int64_t tap, const Quad<T>& a,
                                             const Quad<T>& b, const Quad<T>& c) {
  T* p = static_cast<T*>(t.data) + offset;
  if (kRows || (t.vec && t.layout == Array::kTapRows)) {
    *reinterpret_cast<Quad<T>*>(p) = a;
    *reinterpret_cast<Quad<T>*>(p + tap) = b;
    *reinterpret_cast<Quad<T>*>(p + 2 * tap) = c;
  } else if (t.vec) {
    Quad<T> flat[3] = {};
#pragma unroll
    for (int i = 0; i < 12; ++i) set_element(flat[i / 4], i % 4, element(i % 3 == 0 ? a : i % 3 == 1 ? b : c, i / 3));
#pragma unroll
    for (int i = 0; i < 3; ++i) reinterpret_cast<Quad<T>*>(p)[i] = flat[i];
  } else {
#pragma unroll
    for (int i = 0; i < 12; ++i) assign(p[(i / 3) * channel + (i % 3) * tap], element(i % 3 == 0 ? a : i % 3 == 1 ? b : c, i / 3));
  }
}

template <int kBytes>
__device__ __forceinline__ void copy_async(void* shared, const void* global) {
  const auto to = static_cast<std::uint32_t>(__cvta_generic_to_shared(shared));
  if constexpr (kBytes == 16)
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(global) : "memory");
  else
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(to), "l"(global), "n"(kBytes) : "memory");
}
/// 16 bytes, or zeros where nothing is to be read.
__device__ __forceinline__ void copy_async_or_zero(void* shared, const void* global, bool valid) {
  const auto to = static_cast<std::uint32_t>(__cvta_generic_to_shared(shared));
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(global), "r"(valid ? 16 : 0) : "memory");
}
/// This thread's arrival at a barrier that expects one of every thread, once its copies are there.
__device__ __forceinline__ void arrive_with_copies(std::uint64_t* barrier) {
  const auto at = static_cast<std::uint32_t>(__cvta_generic_to_shared(barrier));
  asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(at) : "memory");
}
__device__ __forceinline__ void wait_copies() { asm volatile("cp.async.wait_all;" ::: "memory"); }

__device__ __forceinline__ float dot4(const float (&x)[4], const float (&y)[4]) {
  return fmaf(x[3], y[3], fmaf(x[2], y[2], fmaf(x[1], y[1], x[0] * y[0])));
}
__device__ __forceinline__ void put4(float* to, const float (&x)[4], float factor) {
  *reinterpret_cast<float4*>(to) = make_float4(x[0] * factor, x[1] * factor, x[2] * factor, x[3] * factor);
}

/// Sum over the warp of N values, the same in every lane; the tree pairs lanes 16, 8, 4, 2 and 1 apart.
template <int N>
__device__ __forceinline__ void warp_sums(float (&x)[N]) {
#pragma unroll
  for (int d = 16; d > 0; d /= 2)
#pragma unroll
    for (int i = 0; i < N; ++i) x[i] += __shfl_xor_sync(kAll, x[i], d);
}

/// Values that are the same in the whole warp, told so to the compiler: branches on them need no care for divergence, and addresses
/// from them are computed once a warp.
__device__ __forceinline__ int uniform(int x) { return __shfl_sync(kAll, x, 0); }
__device__ __forceinline__ std::int64_t uniform(std::int64_t x) { return __shfl_sync(kAll, static_cast<long long>(x), 0); }
__device__ __forceinline__ int warp_of_block() { return uniform(static_cast<int>(threadIdx.x) / 32); }

/// Programmatic dependent launch; both do nothing where a kernel was launched without it.
__device__ __forceinline__ void wait_for_predecessor() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
__device__ __forceinline__ void launch_successor() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

}  // namespace specstate::kda::cuda
