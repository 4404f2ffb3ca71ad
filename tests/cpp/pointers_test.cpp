// Plain pointers and counts of the C++ interface: what is null, negative or out of line is named, and nothing is touched.
#include <gtest/gtest.h>

#include <vector>

#include "specstate/accept.hpp"
#include "specstate/draft_kv.hpp"
#include "specstate/hisparse.hpp"
#include "specstate/hisparse_coordinator.hpp"
#include "specstate/kda.hpp"
#include "text_of.hpp"

namespace specstate {
namespace {

using testing::text_of;

TEST(Pointers, ViewsWithoutMemory) {
  std::int32_t i32[32] = {};
  accept::VerifyGreedyParams p;
  p.candidates = {nullptr, DType::kInt32, {1, 3}};
  p.target_argmax = {i32, DType::kInt32, {1, 3}};
  p.accept_lens = {i32 + 8, DType::kInt32, {1}};
  p.out_tokens = {i32 + 16, DType::kInt32, {1, 3}};
  EXPECT_EQ(text_of([&] { accept::verify_greedy(p); }), "verify_greedy: candidates: expected memory for shape (1, 3), got a null pointer.");
  p.candidates = {i32, DType::kInt32, {-1, 3}};
  EXPECT_NE(text_of([&] { accept::verify_greedy(p); }), "");
  EXPECT_EQ(text_of([&] {
              draft_kv::KvProjection(TensorView(nullptr, DType::kFloat32, {1, 32, 16}));
            }),
            "KvProjection: kv_weight: expected memory for shape (1, 32, 16), got a null pointer.");
}

TEST(Pointers, ArraysOfViews) {
  std::int64_t src[4] = {};
  std::int32_t i32[32] = {};
  hisparse::ReplayPlanParams replay;
  replay.miss_src = {src, DType::kInt64, {1, 4}};
  replay.miss_dst = {i32, DType::kInt32, {1, 4}};
  replay.miss_count = {i32 + 8, DType::kInt32, {1}};
  replay.num_followers = 1;
  EXPECT_EQ(text_of([&] { hisparse::replay_plan(replay); }), "replay_plan: followers: expected 1 entries, got a null pointer.");
  replay.num_followers = -1;
  EXPECT_EQ(text_of([&] { hisparse::replay_plan(replay); }), "replay_plan: num_followers: expected 0 or more, got -1.");
  EXPECT_EQ(text_of([] { kda::rollback_conv_windows(nullptr, 1); }),
            "rollback_conv_windows: params: expected 1 entries, got a null pointer.");
  EXPECT_EQ(text_of([] { kda::rollback_conv_windows(nullptr, -1); }), "rollback_conv_windows: count: expected 0 or more, got -1.");
  hisparse::TransferPagedParams transfer;
  transfer.src_indices = transfer.dst_indices = {i32, DType::kInt32, {0}};
  transfer.num_layers = 1;
  EXPECT_EQ(text_of([&] { hisparse::transfer_paged(transfer); }), "transfer_paged: src: expected 1 entries, got a null pointer.");
}

TEST(Pointers, StateBlocks) {
  alignas(64) char block[4096];
  EXPECT_NE(text_of([] { hisparse::swap_state_view({1, 4, 0, 16}, nullptr); }).find("memory: expected a block"), std::string::npos);
  EXPECT_NE(text_of([&] {
              hisparse::swap_state_view({1, 4, 0, 16}, block + 1);
            }).find("memory: expected alignment to 64 bytes"),
            std::string::npos);
}

TEST(Pointers, RowsOfTheCoordinator) {
  std::vector<float> host(256), device(256), rows(64);
  hisparse::KvBuffers b;
  b.host_cache = {host.data(), DType::kFloat32, {32, 8}};
  b.device_buffer = {device.data(), DType::kFloat32, {32, 8}};
  hisparse::CoordinatorConfig c;
  c.requests = 1, c.hot = 4, c.window = 2, c.context = 16, c.page_size = 4;
  hisparse::Coordinator x(c, {&b, 1});
  x.admit(0, 4);
  EXPECT_NE(text_of([&] { x.stage(0, 0, 0, 2, nullptr, 32); }).find("rows: expected memory, got a null pointer"), std::string::npos);
  EXPECT_NE(text_of([&] { x.stage(0, 0, 0, 2, rows.data(), 1); }).find("pitch: expected at least the 32 bytes of a row, or 0, got 1"),
            std::string::npos);
  const std::int64_t request[] = {0}, width[] = {2};
  x.prepare_verify(request, width);
  EXPECT_NE(text_of([&] { x.write(0, 0, 0, nullptr); }).find("row: expected memory, got a null pointer"), std::string::npos);
}

}  // namespace
}  // namespace specstate
