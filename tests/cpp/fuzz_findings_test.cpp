// What the fuzz targets found, one test a finding, so that it stays fixed where nothing is fuzzed.
#include <gtest/gtest.h>

#include <cstdint>
#include <vector>

#include "specstate/draft_kv.hpp"
#include "specstate/error.hpp"
#include "specstate/kda.hpp"

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

// A padding row that runs from zeros has no row of conv windows when there are no snapshots: it wrote one before the first.
TEST(FuzzFindings, PaddingRowsFromZeroWriteNoConvWindows) {
  constexpr std::int64_t D = 64;
  std::vector<float> x(D, 0.5f), weight(4 * D, 0.25f), inputs(3 * D, 1.0f), gate(D, 0.1f), state(D * D, 1.0f), out(D, -1.0f);
  std::vector<float> windows(3 * 3 * D, 7.0f);  // one row, and as much on each side
  float beta = 0.5f, a_log = 0.0f;
  std::int32_t slot = -1, cu[] = {0, 1};
  kda::VerifyParams p;
  p.x_q = p.x_k = p.x_v = {x.data(), DType::kFloat32, {1, 1, D}};
  p.w_q = p.w_k = p.w_v = {weight.data(), DType::kFloat32, {D, 4}};
  p.cs_q = p.cs_k = p.cs_v = {inputs.data(), DType::kFloat32, {1, D, 3}};
  p.g = {gate.data(), DType::kFloat32, {1, 1, D}};
  p.beta = {&beta, DType::kFloat32, {1, 1}};
  p.A_log = {&a_log, DType::kFloat32, {1}};
  p.dt_bias = {gate.data(), DType::kFloat32, {1, D}};
  p.state = {state.data(), DType::kFloat32, {1, 1, D, D}};
  p.slots = {&slot, DType::kInt32, {1}};
  p.cu_seqlens = {cu, DType::kInt32, {2}};
  p.out = {out.data(), DType::kFloat32, {1, 1, D}};
  std::vector<float> conv_k(3 * D), conv_v(3 * D);
  p.conv_q = {windows.data() + 3 * D, DType::kFloat32, {1, 1, D, 3}};
  p.conv_k = {conv_k.data(), DType::kFloat32, {1, 1, D, 3}};
  p.conv_v = {conv_v.data(), DType::kFloat32, {1, 1, D, 3}};
  p.null_from_zero = true;
  kda::verify(p);
  EXPECT_NE(out[0], -1.0f);
  EXPECT_EQ(windows, std::vector<float>(windows.size(), 7.0f));
}

}  // namespace
