// What the fuzz targets found, one test a finding, so that it stays fixed where nothing is fuzzed.
#include <gtest/gtest.h>

#include <cstdint>

#include "specstate/draft_kv.hpp"
#include "specstate/error.hpp"

using namespace specstate;

namespace {

TEST(FuzzFindings, HeadSizesWhoseProductLeaves64Bits) {
  float kv[8] = {}, out[4] = {};
  std::int32_t position = 0;
  draft_kv::FusedNormRopeStackedParams p;
  p.kv = {kv, DType::kFloat32, {1, 1, 8}};
  p.positions = {&position, DType::kInt32, {1}};
  p.k_out = p.v_out = {out, DType::kFloat32, {1, 1, 1, 4}};
  for (const auto& [heads, dim] :
       {std::pair<std::int64_t, std::int64_t>{INT64_MAX, 4}, {1, INT64_MAX}, {INT64_MAX / 8, 9}, {1LL << 32, 1LL << 32}}) {
    p.num_kv_heads = heads, p.head_dim = dim, p.rotary_dim = 2;
    EXPECT_THROW(draft_kv::fused_norm_rope_stacked(p), Error) << heads << " heads of " << dim;
  }
}

}  // namespace
