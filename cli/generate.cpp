#include "generate.hpp"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <nlohmann/json.hpp>

#include "core/dispatch.hpp"
#include "cuda_probe.hpp"
#include "output.hpp"
#include "runtime/file.hpp"
#include "runtime/ranks.hpp"
#include "specstate/error.hpp"

namespace specstate::cli {

namespace {

// Far more than any context takes; the engine says what is too long for the model.
constexpr std::size_t kMaxPromptFile = std::size_t{64} << 20;

nlohmann::ordered_json to_json(const runtime::Report& r, runtime::Mode asked) {
  nlohmann::ordered_json j;
  j["text"] = r.requests[0].text;
  j["tokens"] = r.requests[0].tokens;
  j["mode"] = runtime::name_of(asked);
  if (asked == runtime::Mode::kAuto) j["mostly"] = runtime::name_of(r.mode);  // of the steps; `note` counts them
  if (!r.note.empty()) j["note"] = r.note;
  if (r.gpu.device_bytes > 0)
    j["gpu"] = {{"device_bytes", r.gpu.device_bytes},
                {"pinned_bytes", r.gpu.pinned_bytes},
                {"graphs", r.gpu.graphs},
                {"ranks", r.gpu.ranks},
                {"products", r.gpu.products}};
  if (r.costs.plain > 0)
    j["costs"] = {{"plain_seconds", r.costs.plain},
                  {"dflash_draft_seconds", r.costs.dflash_draft},
                  {"dspark_draft_seconds", r.costs.dspark_draft},
                  {"verify_seconds", r.costs.verify}};
  j["steps"] = r.steps;
  j["committed_tokens"] = r.committed_tokens;
  j["mean_accepted_length"] = r.mean_accepted_length;
  j["accepted_lengths"] = r.accepted_lengths;
  j["tokens_per_second"] = r.tokens_per_second;
  j["prefill_seconds"] = r.prefill_seconds;
  j["decode_seconds"] = r.decode_seconds;
  j["hisparse"] = {{"hits", r.hisparse.hits},           {"misses", r.hisparse.misses},
                   {"hit_rate", r.hisparse.hit_rate},   {"host_bytes_copied", r.hisparse.host_bytes_copied},
                   {"hot_slots", r.hisparse.hot_slots}, {"top_k", r.hisparse.top_k}};
  j["kda"] = {
      {"state_bytes", r.kda.state_bytes}, {"ring_bytes", r.kda.ring_bytes}, {"snapshot_bytes_avoided", r.kda.snapshot_bytes_avoided}};
  j["draft_kv"] = {{"tokens_materialized", r.draft_kv.tokens_materialized}, {"bytes_written", r.draft_kv.bytes_written}};
  if (r.lossless) j["lossless"] = *r.lossless;
  for (const runtime::RequestReport& q : r.requests) {
    j["requests"].push_back({{"text", q.text},
                             {"tokens", q.tokens},
                             {"finish", q.finish},
                             {"prompt_tokens", q.prompt_tokens},
                             {"steps", q.steps},
                             {"committed_tokens", q.committed_tokens},
                             {"state_digest", fmt::format("{:016x}", q.state_digest)}});
    if (q.lossless) j["requests"].back()["lossless"] = *q.lossless;
  }
  return j;
}

/// Why the prompts ended: the reasons that there were, with how many prompts where there were several.
std::string ends(const runtime::Report& r, int context) {
  const std::pair<const char*, std::string> reasons[] = {
      {"length", "at the limit of --max-new-tokens"},
      {"eos", "at the model's end of text"},
      {"context", fmt::format("because the model's context of {} positions is full", context)},
      {"dropped", "dropped"}};
  std::string s;
  for (const auto& [finish, text] : reasons) {
    const auto n = std::count_if(r.requests.begin(), r.requests.end(), [&](const runtime::RequestReport& q) { return q.finish == finish; });
    if (n > 0) s += (s.empty() ? "" : ", ") + (r.requests.size() > 1 ? fmt::format("{} of {} prompts ", n, r.requests.size()) : "") + text;
  }
  return s;
}

std::string to_text(const runtime::Report& r, runtime::Mode asked, int context) {
  std::string s;
  const auto line = [&](const char* what, const std::string& value) { s += fmt::format("{:<10}{}\n", what, value); };
  std::size_t tokens = 0;
  int prompt = 0;
  for (const runtime::RequestReport& q : r.requests) tokens += q.tokens.size(), prompt += q.prompt_tokens;
  line("mode", asked == runtime::Mode::kAuto ? r.note + "; mostly " + runtime::name_of(r.mode) : runtime::name_of(r.mode));
  line("tokens", fmt::format("{} new after {} of prompt; {} steps, {:.2f} tokens a step", tokens, prompt, r.steps, r.mean_accepted_length));
  line("ended", ends(r, context));
  line("speed", fmt::format("{:.0f} tokens/s decoding; prefill {:.0f} tokens/s", r.tokens_per_second,
                            r.prefill_seconds > 0 ? prompt / r.prefill_seconds : 0.0));
  line("hisparse",
       fmt::format("{} hits, {} misses ({:.1f} % hits), {} bytes from the host; {} hot slots, top-k {}", r.hisparse.hits, r.hisparse.misses,
                   100 * r.hisparse.hit_rate, r.hisparse.host_bytes_copied, r.hisparse.hot_slots, r.hisparse.top_k));
  line("kda", fmt::format("{} bytes of state, {} of rings; {} bytes of snapshots avoided", r.kda.state_bytes, r.kda.ring_bytes,
                          r.kda.snapshot_bytes_avoided));
  line("draft KV", fmt::format("{} tokens materialized, {} bytes written", r.draft_kv.tokens_materialized, r.draft_kv.bytes_written));
  if (r.lossless) line("lossless", *r.lossless ? "yes: tokens and state equal plain decoding" : "NO: plain decoding gives something else");
  return s;
}

std::string folder_of(const GenerateCommand& command) {
  std::string folder = command.model.empty() ? runtime::find_embedded_model() : command.model;
  if (folder.empty())
    throw Error(
        ErrorKind::kRuntime,
        "the embedded model (models/specstate-bytes) was found neither beside this build nor installed; name a folder with --model.");
  return folder;
}

/// In this process; as one of `ranks` where there are several. The first of them writes.
int generate_here(const GenerateCommand& command, runtime::Ranks* ranks) {
  const bool writes = !ranks || ranks->rank() == 0;
  if (command.device == "cuda")
    if (const CudaReport cuda = probe_cuda(0); cuda.devices.empty())
      throw Error(ErrorKind::kCuda, "--device cuda: expected a GPU, got none: " + cuda.problem + ".");
  const std::string folder = folder_of(command);
  std::vector<std::string> prompts = command.prompts;
  for (const std::string& file : command.prompt_files) prompts.push_back(runtime::read_text(file, kMaxPromptFile));

  runtime::Engine engine(folder);
  if (command.options.hot_slots < engine.top_k())
    throw BadOption(fmt::format("--hot-slots: expected an integer from {} (what this model selects at once) to 1048576, got '{}'",
                                engine.top_k(), command.options.hot_slots));
  runtime::Callbacks callbacks;
  // JSON on stdout must stay JSON; a batch is written prompt by prompt when all are done.
  const bool json_only = command.json == "-", stream = writes && !json_only && prompts.size() == 1;
  if (stream)
    callbacks.text = [](std::size_t, std::string_view bytes) {
      std::fwrite(bytes.data(), 1, bytes.size(), stdout);
      std::fflush(stdout);
    };
  const bool progress =
      writes && isatty(STDERR_FILENO) && std::any_of(prompts.begin(), prompts.end(), [](const std::string& p) { return p.size() > 1000; });
  if (progress)
    callbacks.prefill = [&](std::size_t request, int done, int total) {
      // After the last chunk the line is wiped.
      std::fputs(
          done < total ? fmt::format("\rprefill {}/{}: {} of {} tokens", request + 1, prompts.size(), done, total).c_str() : "\r\x1b[K",
          stderr);
    };
  runtime::GenerateOptions options = command.options;
  if (command.device == "cuda") options.device = DeviceType::kCuda;
  options.trace = !command.trace.empty(), options.ranks = ranks;
  const runtime::Report report = engine.generate(prompts, options, callbacks);
  const int status = report.lossless.value_or(true) ? kOk : kNotLossless;
  if (!writes) return status;

  if (stream) std::fputc('\n', stdout);
  if (!json_only && !stream)
    for (std::size_t i = 0; i < prompts.size(); ++i) {
      std::fputs(fmt::format("== {}\n", i + 1).c_str(), stdout);
      std::fwrite(report.requests[i].text.data(), 1, report.requests[i].text.size(), stdout);
      std::fputc('\n', stdout);
    }
  finish_stdout();
  std::fputs(to_text(report, options.mode, engine.context()).c_str(), stderr);
  // Bytes of the text that are not UTF-8 become U+FFFD in JSON; `tokens` is exact.
  if (!command.json.empty())
    write_json(command.json, to_json(report, options.mode).dump(2, ' ', false, nlohmann::json::error_handler_t::replace));
  if (!command.trace.empty()) write_json(command.trace, report.trace);
  return status;
}

}  // namespace

int run_generate(const GenerateCommand& command) {
  check_json(command.json);
  if (!command.trace.empty()) check_json(command.trace);
  if (const int most = command.tensor_parallel > 1 ? runtime::most_ranks(folder_of(command)) : 1; command.tensor_parallel > most)
    throw BadOption(fmt::format("--tensor-parallel: expected an integer from 1 to {} (a head of each kind of this model a rank), got '{}'",
                                most, command.tensor_parallel));
  if (command.device == "cuda" && !core::cuda_built())
    throw Error(
        ErrorKind::kNotImplemented,
        "--device cuda: this build of specstate has no CUDA kernels; use --device cpu, or build it with them: `make build` where nvcc is.");
  if (command.tensor_parallel == 1) return generate_here(command, nullptr);
  // Processes are made here, before anything has started a thread or a driver.
  constexpr double kStallSeconds = 120;
  const runtime::RanksOutcome outcome = runtime::run_ranks(command.tensor_parallel, kStallSeconds, [&](runtime::Ranks& ranks) {
    try {
      return generate_here(command, &ranks);
    } catch (const BadOption& e) {
      ranks.fail(e.what());
      return static_cast<int>(kUsage);
    }
  });
  if (outcome.error.empty()) return outcome.status;
  if (outcome.status == kUsage) throw BadOption(outcome.error);
  throw Error(ErrorKind::kRuntime, outcome.error);
}

}  // namespace specstate::cli
