// One speculative step of two sparse layers over a KV cache that lives in host memory. Layer 0 selects positions, layer 1 shares its
// selection. Three positions are verified, two stand. The engine sees device rows only: which of them had to come from the host, and
// what they replaced, is the swap's business. An engine with its own tables calls hisparse::swap_in and replay_plan directly.
#include <cstdint>
#include <cstdio>
#include <specstate/hisparse_coordinator.hpp>
#include <vector>

using namespace specstate;

constexpr std::int64_t kLayers = 2, kWindow = 3, kTopK = 4, kHot = 8, kPrompt = 20, kContext = 64;
constexpr std::int64_t kHostRows = 64, kDeviceRows = 64, kWidth = 16;  // a cached row of one layer: 16 floats

/// What the engine caches for a position: here a number that tells layer and position.
float value(std::int64_t layer, std::int64_t position) { return static_cast<float>(1000 * layer + position); }

int main() {
  std::vector<float> host[kLayers], device[kLayers];
  std::vector<hisparse::KvBuffers> buffers;
  for (std::int64_t l = 0; l < kLayers; ++l) {
    host[l].resize(kHostRows * kWidth), device[l].resize(kDeviceRows * kWidth);
    hisparse::KvBuffers b;
    b.host_cache = {host[l].data(), DType::kFloat32, {kHostRows, kWidth}};
    b.device_buffer = {device[l].data(), DType::kFloat32, {kDeviceRows, kWidth}};
    buffers.push_back(b);
  }
  hisparse::CoordinatorConfig config;
  config.requests = 4, config.hot = kHot, config.window = kWindow, config.context = kContext, config.top_k = kTopK;
  config.scratch = kWindow * kTopK - kHot;  // one call may want more different rows than are hot
  config.page_size = 8;
  config.anchor_of = {0, 0};  // layer 1 follows layer 0
  hisparse::Coordinator cache(config, buffers);

  // Prefill: every layer's rows go to the host, and into hot slots while there are some.
  const std::int64_t r = 0;
  cache.admit(r, kPrompt);
  std::vector<float> rows(kPrompt * kWidth);
  for (std::int64_t l = 0; l < kLayers; ++l) {
    for (std::int64_t t = 0; t < kPrompt; ++t) rows[static_cast<std::size_t>(t * kWidth)] = value(l, t);
    cache.stage(l, r, 0, {rows.data(), DType::kFloat32, {kPrompt, kWidth}});
  }
  cache.append(r, kPrompt);

  // Verify: the drafts get device rows, which the engine's projections write.
  const std::int64_t requests[] = {r}, widths[] = {kWindow}, accepted[] = {2};
  std::int32_t drafts[kWindow];
  cache.prepare_verify(requests, widths, {drafts, DType::kInt32, {1, kWindow}});
  for (std::int64_t l = 0; l < kLayers; ++l)
    for (std::int64_t j = 0; j < kWindow; ++j) device[l][static_cast<std::size_t>(drafts[j] * kWidth)] = value(l, kPrompt + j);

  // What the indexer chose for each of the three queries, and what each of them sees: everything up to itself.
  std::int32_t chosen[kWindow][kTopK] = {{20, 3, 12, 15}, {21, 20, 12, 17}, {22, 21, 3, 12}};
  std::int32_t visible[kWindow] = {kPrompt + 1, kPrompt + 2, kPrompt + 3}, batch[] = {static_cast<std::int32_t>(r)};
  std::int32_t at[kWindow][kTopK];
  hisparse::SwapInParams swap;
  swap.top_k_tokens = {chosen, DType::kInt32, {1, kWindow, kTopK}};
  swap.seq_lens = {visible, DType::kInt32, {1, kWindow}};
  swap.req_pool_indices = {batch, DType::kInt32, {1}};
  swap.top_k_device_locs = {at, DType::kInt32, {1, kWindow, kTopK}};
  cache.swap(0, swap);
  cache.follow(1);  // the same device rows hold layer 1's rows now

  bool right = true;  // attention would read these rows
  for (std::int64_t l = 0; l < kLayers; ++l)
    for (std::int64_t s = 0; s < kWindow; ++s)
      for (std::int64_t k = 0; k < kTopK; ++k)
        right = right && device[l][static_cast<std::size_t>(at[s][k] * kWidth)] == value(l, chosen[s][k]);

  cache.accept(requests, accepted);  // two drafts stand: backed up to the host, the third is forgotten
  const hisparse::CoordinatorStats& s = cache.stats();
  std::printf("%d rows selected, %d copied from the host, all %s; %d positions committed\n", static_cast<int>(kWindow * kTopK),
              static_cast<int>(s.unique_misses), right ? "right" : "wrong", static_cast<int>(cache.length(r)));
  cache.finish(r);
  return right ? 0 : 1;
}
