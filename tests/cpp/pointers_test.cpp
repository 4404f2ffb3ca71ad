// Plain pointers and counts of the C++ interface: what is null, negative or out of line is named, and nothing is touched.
#include <gtest/gtest.h>

#include <vector>

#include "specstate/accept.hpp"
#include "specstate/draft_kv.hpp"
#include "specstate/hisparse.hpp"
#include "specstate/hisparse_coordinator.hpp"
#include "specstate/hisparse_steps.hpp"
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

/// A broadcast list may claim more entries than an int32 counts; none of them is walked, and no product of them comes back into range.
TEST(Pointers, ListsOfMoreThanAnybodyCounts) {
  std::int32_t i32[32] = {};
  std::int64_t i64[4] = {};
  float real[32] = {};
  const auto broadcast = [](void* data, DType d, std::initializer_list<std::int64_t> sizes) {
    TensorView t(data, d, sizes);
    for (auto& stride : t.strides) stride = 0;
    return t;
  };
  constexpr std::int64_t kMany = std::int64_t{1} << 31;
  hisparse::CopyRowsParams copy;
  copy.src_rows = copy.dst_rows = broadcast(i64, DType::kInt64, {kMany});
  EXPECT_EQ(text_of([&] { hisparse::copy_rows(copy); }),
            "copy_rows: src_rows: expected at most 2147483647 entries, got shape (2147483648,).");
  hisparse::TransferPagedParams transfer;
  transfer.src_indices = transfer.dst_indices = copy.src_rows;
  EXPECT_EQ(text_of([&] { hisparse::transfer_paged(transfer); }),
            "transfer_paged: src_indices: expected at most 2147483647 entries, got shape (2147483648,).");
  hisparse::SwapInParams swap;  // without selections nothing is written, so no memory bounds the batch
  swap.top_k_tokens = {i32, DType::kInt32, {kMany, 1, 0}};
  swap.seq_lens = broadcast(i32, DType::kInt32, {kMany, 1});
  swap.req_pool_indices = broadcast(i32, DType::kInt32, {kMany});
  EXPECT_EQ(text_of([&] { hisparse::swap_in(swap); }),
            "swap_in: req_pool_indices: expected at most 2147483647 entries, got shape (2147483648,).");
  kda::DeferFoldParams defer;
  defer.pending = {i32, DType::kInt32, {8}};
  defer.slots = defer.accept = broadcast(i64, DType::kInt64, {kMany});
  EXPECT_EQ(text_of([&] { kda::defer_fold(defer); }), "defer_fold: slots: expected at most 2147483647 entries, got shape (2147483648,).");
  accept::VerifyGreedyParams greedy;
  greedy.candidates = greedy.target_argmax = broadcast(i32, DType::kInt32, {0, kMany});
  EXPECT_EQ(text_of([&] { accept::verify_greedy(greedy); }),
            "verify_greedy: candidates: expected at most 2147483647 columns, got shape (0, 2147483648).");
  accept::PlanVerifyLengthsParams plan;
  plan.confidences = broadcast(real, DType::kFloat32, {1, kMany - 1});
  plan.out = {i32, DType::kInt32, {1}};
  EXPECT_EQ(text_of([&] { accept::plan_verify_lengths(plan); }),
            "plan_verify_lengths: confidences: expected at most 2147483646 proposals a row, got shape (1, 2147483647).");
}

/// A scale that comes as a CPU scalar is read by the host, wherever the other tensors are.
TEST(Pointers, ScalesWithoutMemory) {
  alignas(8) float x[256] = {};
  std::int64_t i64[2] = {};
  TensorView pool(x, DType::kFloat32, {1, 2, 1, 2}), other(x + 64, DType::kFloat32, {1, 2, 1, 2});
  draft_kv::MaterializeIntoPoolParams p;
  p.ctx_hidden = {x + 128, DType::kFloat32, {1, 4}};
  p.kv_weight = {x + 136, DType::kFloat32, {1, 4, 4}};
  p.k_norm_weight = {x + 160, DType::kFloat32, {1, 2}};
  p.eps = {x + 164, DType::kFloat32, {1}};
  p.cos_sin_cache = {x + 168, DType::kFloat32, {1, 2}};
  p.positions = {i64, DType::kInt64, {1}};
  p.slot_mapping = {i64 + 1, DType::kInt64, {1}};
  p.k_pool = {&pool, 1}, p.v_pool = {&other, 1};
  EXPECT_EQ(text_of([&] { draft_kv::materialize_into_pool(p); }), "");
  p.v_scale = {nullptr, DType::kFloat64, {}};
  EXPECT_EQ(text_of([&] { draft_kv::materialize_into_pool(p); }),
            "materialize_into_pool: v_scale: expected memory for shape (), got a null pointer.");
  p.v_scale = {reinterpret_cast<char*>(x) + 2, DType::kFloat64, {}};
  EXPECT_EQ(text_of([&] { draft_kv::materialize_into_pool(p); }),
            "materialize_into_pool: v_scale: expected a data pointer that is a multiple of 8 bytes, got remainder 2.");
}

/// Sizes that are fine one by one, of which together no 64 bits count the bytes.
TEST(Pointers, StatesOfMoreBytesThan64BitsCount) {
  constexpr std::int64_t n = INT32_MAX;
  EXPECT_EQ(text_of([] {
              hisparse::swap_state_bytes({n, n, n, n});
            }),
            "swap_state_bytes: requests: expected a state whose bytes 64 bits can count, got 2147483647 of 51539607852 bytes.");
  EXPECT_GT(hisparse::swap_state_bytes({1 << 20, n, n, n}), std::int64_t{1} << 54);
  hisparse::CoordinatorConfig c;
  c.requests = c.hot = c.window = c.tail = c.scratch = c.context = c.page_size = n;
  EXPECT_NE(text_of([&] { hisparse::Coordinator::table_bytes(c, 1); }).find("Coordinator: requests: expected tables that fit the memory"),
            std::string::npos);
  c.requests = 1 << 20;
  EXPECT_GT(hisparse::Coordinator::table_bytes(c, 1), std::int64_t{1} << 54);
  EXPECT_EQ(text_of([&] { hisparse::Coordinator::table_bytes(c, std::int64_t{1} << 40); }),
            "Coordinator: host_cache: expected at most 1048576 layers, got 1099511627776.");
}

/// Numbers at addresses that are no multiples of their size are no numbers, in any family: a GPU could not read them.
TEST(Pointers, NumbersAtOddAddresses) {
  alignas(8) char memory[256] = {};
  std::int32_t i32[32] = {};
  accept::VerifyGreedyParams greedy;
  greedy.candidates = {memory + 2, DType::kInt32, {1, 3}};
  greedy.target_argmax = {i32, DType::kInt32, {1, 3}};
  greedy.accept_lens = {i32 + 8, DType::kInt32, {1}};
  greedy.out_tokens = {i32 + 16, DType::kInt32, {1, 3}};
  EXPECT_EQ(text_of([&] { accept::verify_greedy(greedy); }),
            "verify_greedy: candidates: expected a data pointer that is a multiple of 4 bytes, got remainder 2.");
  kda::DeferFoldParams defer;
  defer.pending = {memory + 1, DType::kInt32, {8}};
  EXPECT_EQ(text_of([&] { kda::defer_fold(defer); }),
            "defer_fold: pending: expected a data pointer that is a multiple of 4 bytes, got remainder 1.");
  draft_kv::MaterializeIntoPoolParams draft;
  draft.ctx_hidden = {memory + 1, DType::kBFloat16, {1, 4}};
  EXPECT_EQ(text_of([&] { draft_kv::materialize_into_pool(draft); }),
            "materialize_into_pool: ctx_hidden: expected a data pointer that is a multiple of 2 bytes, got remainder 1.");
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
