#pragma once
// The reference engine: the embedded hybrid model (KDA + sparse MLA) decoded plainly or speculatively through all three systems.
// A host that has its own engine needs none of this; it shows how the families work together, and proves that speculation is lossless:
// in greedy decoding and in fixed-seed sampling the tokens and all committed state are those of plain decoding, bit for bit.
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "specstate/export.hpp"
#include "specstate/tensor.hpp"

namespace specstate::runtime {

enum class Mode : std::uint8_t {
  kAuto,    ///< whatever a measured cost table says is fastest
  kPlain,   ///< one token a step
  kDFlash,  ///< block drafter (DFlash, Z-Lab 2026)
  kDSpark,  ///< semi-autoregressive block drafter (DSpark, DeepSeek 2026)
};
/// "auto", "plain", "dflash", "dspark".
SPECSTATE_API const char* name_of(Mode mode) noexcept;

/// Where this build or installation keeps the embedded model, searched from the running executable; "" if nowhere.
SPECSTATE_API std::string find_embedded_model();

class Ranks;

struct GenerateOptions {
  Mode mode = Mode::kAuto;
  /// kCuda: the whole of decoding runs on the first GPU, one graph a step (docs/decisions/0013); throws Error(kCuda) where there is none.
  DeviceType device = DeviceType::kCpu;
  /// On a GPU: every result has the bits of plain decoding on it (on the CPU that is always so); otherwise matrix products may be cuBLASLt's.
  /// check_lossless implies it.
  bool deterministic = false;
  int max_batch = 64;        ///< on a GPU: most requests at once; further prompts wait for a place
  int max_new_tokens = 128;  ///< >= 1; generation also ends at EOS and at the end of the model's context
  /// 0: greedy. Else tokens are drawn from softmax(logits / temperature): one uniform number a position, derived from
  /// (seed, prompt, position), and the inverse CDF, so that every mode draws the same tokens.
  double temperature = 0;
  std::uint64_t seed = 0;
  /// Proposals are drawn from the drafter's distribution and verified by rejection sampling (temperature > 0): the target's distribution
  /// exactly, but not the tokens that plain decoding draws.
  bool sampled_proposals = false;
  int chunk = 64;      ///< prefill rows at once; never changes a result
  int hot_slots = 96;  ///< device rows that cache the host's KV, per request and layer; at least index_topk; never changes a result
  /// For tests, 1 or more: each step commits exactly this many tokens where they fit (at most the window). A plain run tells which
  /// proposals are right; the drafter's own are replaced, so the output stays the target's.
  int force_accept = 0;
  bool check_lossless = false;  ///< also decode plainly, and compare tokens and committed state (on a GPU the state after every step)
  /// Prompt i is prefilled before step start_steps[i] (default 0), and dropped before step drop_steps[i] unless it has ended (default: never).
  std::vector<int> start_steps, drop_steps;
  bool trace = false;  ///< on a GPU: report where the time of one step goes
  /// On a GPU: this process is one of several that decode the same prompts together, each with its share of the heads on a GPU of its own
  /// (src/runtime/ranks.hpp; `specstate generate --tensor-parallel` makes them).
  Ranks* ranks = nullptr;
};

/// One decoded prompt.
struct RequestReport {
  std::vector<int> tokens;            ///< emitted ids, without the prompt
  std::string text;                   ///< their bytes, as they are (not always valid UTF-8)
  std::string finish;                 ///< "length", "eos", "context" or "dropped"
  int prompt_tokens = 0;              ///< BOS included
  std::int64_t steps = 0;             ///< forwards of the target after the prefill
  std::int64_t committed_tokens = 0;  ///< tokens that those steps emitted
  std::uint64_t state_digest = 0;     ///< hash of the committed state: equal state, equal digest
  std::optional<bool> lossless;       ///< with check_lossless
};

struct Report {
  std::vector<RequestReport> requests;
  Mode mode = Mode::kPlain;  ///< what ran: for auto, the drafter that was used, or plain; `note` says why
  std::string note;
  std::int64_t steps = 0, committed_tokens = 0;
  double mean_accepted_length = 0;             ///< committed tokens per step of a request
  std::vector<std::int64_t> accepted_lengths;  ///< [window + 1] how often a step committed so many
  double prefill_seconds = 0, decode_seconds = 0;
  double tokens_per_second = 0;  ///< emitted tokens after the first, per second of decoding
  struct HiSparse {
    std::int64_t hits = 0, misses = 0, host_bytes_copied = 0;
    double hit_rate = 0;
    int hot_slots = 0, top_k = 0;
  } hisparse;
  struct Kda {
    std::int64_t state_bytes = 0, ring_bytes = 0, snapshot_bytes_avoided = 0;
  } kda;
  struct DraftKv {
    std::int64_t tokens_materialized = 0, bytes_written = 0;
  } draft_kv;
  /// What a run on a GPU took: bytes allocated before its first step, and graphs made.
  struct Gpu {
    std::int64_t device_bytes = 0, pinned_bytes = 0, graphs = 0;
    int ranks = 1;         ///< GPUs; the bytes are those of one (the first: shared host memory is counted once)
    std::string products;  ///< "row-invariant" or "cuBLASLt"
  } gpu;
  std::string trace;             ///< with options.trace: Chrome trace JSON of one step
  std::optional<bool> lossless;  ///< with check_lossless
  /// What `auto` measured while decoding: seconds a request's share of a step takes; 0 where it had no occasion to measure.
  struct Costs {
    double plain = 0, dflash_draft = 0, dspark_draft = 0;
    std::vector<double> verify;  ///< [window + 1] by rows of a request
  } costs;
};

/// Called while generating, on the calling thread.
struct Callbacks {
  std::function<void(std::size_t request, std::string_view bytes)> text;  ///< newly emitted bytes
  std::function<void(std::size_t request, int done, int total)> prefill;  ///< prompt tokens processed
};

/// A loaded model. One generate at a time.
class SPECSTATE_API Engine {
 public:
  /// Throws Error naming the file, field or tensor that is missing or wrong.
  explicit Engine(const std::string& folder);
  ~Engine();
  Engine(Engine&&) noexcept;

  bool has(Mode mode) const;    ///< false for a drafter that the folder lacks
  int context() const;          ///< positions: prompt with BOS, and what is generated
  int top_k() const;            ///< the least hot_slots
  int window(Mode mode) const;  ///< most tokens that a step can commit

  /// Decodes the prompts as one batch; a request's output does not depend on the others. Throws Error(kValue) naming the option or
  /// prompt that is wrong.
  Report generate(const std::vector<std::string>& prompts, const GenerateOptions& options = {}, const Callbacks& callbacks = {});

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace specstate::runtime
