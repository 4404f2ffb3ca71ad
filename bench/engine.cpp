// The whole engine: microseconds a token of plain and of speculative decoding. On the embedded model as it comes (its weights fit the
// cache, so verifying eight rows costs far more than one), and on the same architecture with random weights that do not fit, where each
// step is made to commit as many tokens as were recorded on the embedded model's held-out prompts, in the same proportions.
#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <random>

#include "bench/harness.hpp"
#include "runtime/decode.hpp"
#include "runtime/synthetic.hpp"
#include "specstate/error.hpp"

namespace specstate::bench {

namespace {

using runtime::Mode;

using Prompts = std::vector<std::vector<int>>;  // tokens

Prompts read_prompts(const std::string& folder, const runtime::TargetConfig& config, std::size_t most) {
  std::vector<std::filesystem::path> files;
  for (const auto& entry : std::filesystem::directory_iterator(folder + "/prompts"))
    if (entry.path().extension() == ".txt") files.push_back(entry.path());
  std::sort(files.begin(), files.end());
  Prompts p;
  // Evenly over the list, which is sorted by domain.
  for (std::size_t i = 0; i < std::min(most, files.size()); ++i) {
    std::ifstream f(files[i * files.size() / std::min(most, files.size())], std::ios::binary);
    p.push_back(runtime::tokens_of(std::string(std::istreambuf_iterator<char>(f), {}), config));
  }
  return p;
}

struct Decoded {
  double us = 1e30;  // a token, best of all rounds
  std::int64_t tokens = 0, steps = 0;
  std::vector<std::int64_t> lengths;
  std::vector<std::vector<std::vector<int>>> emitted;  // [prompts][1]
  double mean() const { return static_cast<double>(tokens) / static_cast<double>(std::max<std::int64_t>(1, steps)); }
};

/// All modes in turn, several rounds, so that whatever else the machine does meets all of them; the best round of each counts.
std::map<Mode, Decoded> decode_all(const runtime::Checkpoint& model, const Prompts& prompts, const std::vector<Mode>& modes, int tokens,
                                   int rounds, const std::map<Mode, std::vector<int>>& lengths) {
  std::map<Mode, Decoded> out;
  runtime::GenerateOptions options;
  options.max_new_tokens = tokens;
  for (int round = 0; round < rounds; ++round)
    for (const Mode mode : modes) {
      Decoded& d = out[mode];
      d.tokens = d.steps = 0;
      d.lengths.clear();
      if (mode == Mode::kPlain) d.emitted.clear();
      double seconds = 0;
      for (std::size_t i = 0; i < prompts.size(); ++i) {
        runtime::RunOptions run;
        run.mode = mode;
        if (const auto it = lengths.find(mode); it != lengths.end()) {
          run.lengths = it->second;
          run.known = out.at(Mode::kPlain).emitted[i];
        }
        const runtime::Report r = runtime::decode(model, {prompts[i]}, options, run, {});
        seconds += r.decode_seconds;
        d.tokens += r.committed_tokens;
        d.steps += r.steps;
        d.lengths.resize(std::max(d.lengths.size(), r.accepted_lengths.size()));
        for (std::size_t k = 0; k < r.accepted_lengths.size(); ++k) d.lengths[k] += r.accepted_lengths[k];
        if (mode == Mode::kPlain) d.emitted.push_back({r.requests[0].tokens});
      }
      d.us = std::min(d.us, seconds * 1e6 / static_cast<double>(std::max<std::int64_t>(1, d.tokens)));
    }
  return out;
}

void add(Report& report, const runtime::Checkpoint& model, const std::string& name, const std::map<Mode, Decoded>& decoded) {
  for (const auto& [mode, d] : decoded) {
    Result r;
    r.ours_us = d.us;
    if (mode == Mode::kPlain) {
      r.floor_us = report.read_us(model.weight_bytes);
      r.floor = "reading the target's weights once a token, measured at this size";
    } else {
      r.floor_us = report.read_us(model.weight_bytes) / d.mean();
      r.floor = fmt::format("reading the target's weights once a step of {:.2f} tokens", d.mean());
      r.peers["plain decoding"] = decoded.at(Mode::kPlain).us;
    }
    report.add("decode", {{"mode", runtime::name_of(mode)}, {"model", name}}, r);
  }
}

void run(Report& report) {
  const std::string folder = runtime::find_embedded_model();
  if (folder.empty()) throw Error(ErrorKind::kRuntime, "bench engine: the embedded model (models/specstate-bytes) was not found.");
  const std::vector<Mode> modes{Mode::kPlain, Mode::kDFlash, Mode::kDSpark, Mode::kAuto};
  std::map<Mode, std::vector<int>> lengths;
  {
    const runtime::Checkpoint model = runtime::load_checkpoint(folder);
    const Prompts prompts = read_prompts(folder, model.target.config, report.quick() ? 2 : 12);
    const auto decoded = decode_all(model, prompts, modes, report.quick() ? 24 : 256, report.quick() ? 1 : 3, {});
    add(report, model, "embedded", decoded);
    // The recorded lengths in a fixed random order, as a step of the synthetic model will commit them.
    std::mt19937 random(1);
    for (const Mode mode : {Mode::kDFlash, Mode::kDSpark}) {
      std::vector<int>& sequence = lengths[mode];
      const std::vector<std::int64_t>& counts = decoded.at(mode).lengths;
      for (std::size_t k = 1; k < counts.size(); ++k)
        sequence.insert(sequence.end(), static_cast<std::size_t>(counts[k]), static_cast<int>(k));
      std::shuffle(sequence.begin(), sequence.end(), random);
    }
  }
  // The embedded model's shape, widened until its weights are far beyond the caches; the drafters in the same proportion.
  runtime::SyntheticShape s;
  const int heads = report.quick() ? 3 : 11;
  s.hidden = 64 * heads;
  s.intermediate = 448 * heads / 3;
  s.layers = 8;
  s.mla_every = 4;
  s.kda_heads = s.mla_heads = heads;
  s.kv_lora_rank = 64;
  s.nope_dim = 32;
  s.rope_dim = 16;
  s.v_dim = 64;
  s.index_heads = 2;
  s.index_dim = 32;
  s.top_k = 64;
  s.max_length = 8192;
  s.draft_layers = 3;
  s.draft_heads = heads;
  s.draft_head_dim = 64;
  s.draft_intermediate = 352 * heads / 3;
  s.window = 512;
  s.block = 8;
  s.markov_rank = 32;
  s.feature_layers = {1, 4, 6};
  const std::string synthetic = (std::filesystem::temp_directory_path() / ("specstate_bench_" + std::to_string(::getpid()))).string();
  runtime::write_synthetic_checkpoint(synthetic, s, 1);
  const runtime::Checkpoint model = runtime::load_checkpoint(synthetic);
  std::filesystem::remove_all(synthetic);
  const Prompts prompts = read_prompts(folder, model.target.config, report.quick() ? 1 : 3);
  const auto decoded =
      decode_all(model, prompts, {Mode::kPlain, Mode::kDFlash, Mode::kDSpark}, report.quick() ? 16 : 160, report.quick() ? 1 : 4, lengths);
  add(report, model, "synthetic_" + std::to_string(model.weight_bytes / 1000000) + "MB", decoded);
}

const bool registered = add_family("engine", run);

}  // namespace

}  // namespace specstate::bench
