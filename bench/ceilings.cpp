#include "bench/ceilings.hpp"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "bench/ceilings.cpp"
#include "cpu/simd.hpp"
//
#include "hwy/foreach_target.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace specstate::bench::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

using D = hn::CappedTag<float, 16>;
using DU = hn::RebindToUnsigned<D>;
constexpr int kLanes = static_cast<int>(hn::MaxLanes(D()));

double fma_loop_in(std::int64_t steps) {
  constexpr int kSums = 12;
  const D d;
  hn::Vec<D> sum[kSums];
  for (int i = 0; i < kSums; ++i) sum[i] = hn::Set(d, static_cast<float>(i));
  const auto a = hn::Set(d, 0.999f), b = hn::Set(d, 0.001f);
  for (std::int64_t s = 0; s < steps; ++s)
#pragma GCC unroll 12
    for (int i = 0; i < kSums; ++i) sum[i] = hn::MulAdd(sum[i], a, b);
  for (int i = 1; i < kSums; ++i) sum[0] = hn::Add(sum[0], sum[i]);
  volatile float keep = hn::GetLane(sum[0]);
  (void)keep;
  return 2.0 * static_cast<double>(steps) * kSums * kLanes;
}

template <int kStreams>
void read_streams(const void* memory, std::int64_t bytes) {
  constexpr int kSums = 8;
  const DU d;
  const auto* p = static_cast<const std::uint32_t*>(memory);
  const std::int64_t words = bytes / 4, stream = words / kStreams / (16 * kSums) * (16 * kSums);
  constexpr std::int64_t kStep = kSums / kStreams;  // vectors of each stream in a round
  hn::Vec<DU> sum[kSums];
  for (int i = 0; i < kSums; ++i) sum[i] = hn::Zero(d);
  for (std::int64_t w = 0; w < stream; w += kStep * kLanes)
#pragma GCC unroll 8
    for (int i = 0; i < kSums; ++i) sum[i] = hn::Or(sum[i], hn::LoadU(d, p + i / kStep * stream + w + i % kStep * kLanes));
  for (std::int64_t w = kStreams * stream; w < words; w += kLanes) sum[0] = hn::Or(sum[0], hn::LoadU(d, p + w));
  for (int i = 1; i < kSums; ++i) sum[0] = hn::Or(sum[0], sum[i]);
  volatile std::uint32_t keep = hn::GetLane(sum[0]);
  (void)keep;
}
void read_loop_in(const void* memory, std::int64_t bytes, bool many_streams) {
  many_streams ? read_streams<8>(memory, bytes) : read_streams<1>(memory, bytes);
}

}  // namespace specstate::bench::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace specstate::bench {

HWY_EXPORT(fma_loop_in);
HWY_EXPORT(read_loop_in);

double fma_loop(std::int64_t steps) { return HWY_DYNAMIC_DISPATCH(fma_loop_in)(steps); }
void read_loop(const void* memory, std::int64_t bytes, bool many_streams) {
  HWY_DYNAMIC_DISPATCH(read_loop_in)(memory, bytes, many_streams);
}

}  // namespace specstate::bench
#endif
