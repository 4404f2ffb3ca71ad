// The command line. CLI11 is included here and nowhere else (it costs 9 s a file); each subcommand takes a plain struct.
#include <CLI/CLI.hpp>
#include <charconv>
#include <cmath>
#include <cstdio>
#include <exception>
#include <string>
#include <vector>

#include "bench.hpp"
#include "doctor.hpp"
#include "generate.hpp"
#include "output.hpp"
#include "specstate/error.hpp"
#include "specstate/version.hpp"

namespace {

using namespace specstate;
using namespace specstate::cli;

std::string one_line(std::string text) {
  for (char& c : text)
    if (c == '\n' || c == '\r') c = ' ';
  while (!text.empty() && text.back() == ' ') text.pop_back();
  return text;
}

/// The subcommand that the command line got to.
const CLI::App& deepest(const CLI::App& app) {
  const CLI::App* at = &app;
  while (!at->get_subcommands().empty()) at = at->get_subcommands().front();
  return *at;
}

int usage(const CLI::App& app, const std::string& what) {
  const CLI::App& at = deepest(app);
  const std::string command = &at == &app ? "specstate" : "specstate " + at.get_name();
  std::fprintf(stderr, "%s: %s (see `%s --help`)\n", command.c_str(), one_line(what).c_str(), command.c_str());
  return kUsage;
}

/// A check that says what was expected and what was got. CLI11 puts the option's name in front.
template <class T>
CLI::Validator number(T low, T high, const std::string& expected) {
  return CLI::Validator(
      [=](std::string& text) -> std::string {
        T value{};
        const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
        const bool ok = error == std::errc() && end == text.data() + text.size() && value >= low && value <= high;
        return ok ? "" : "expected " + expected + ", got '" + text + "'";
      },
      "");
}

CLI::Validator one_of(const std::vector<std::string>& words) {
  return CLI::Validator(
      [=](std::string& text) -> std::string {
        std::string all;
        for (const std::string& w : words) {
          if (w == text) return "";
          all += (all.empty() ? "" : ", ") + w;
        }
        return "expected one of " + all + ", got '" + text + "'";
      },
      "");
}

/// An empty name is a variable that was not set, not a default that was asked for.
CLI::Validator not_empty() {
  return CLI::Validator([](std::string& text) -> std::string { return text.empty() ? "expected a name, got ''" : ""; }, "");
}

int run(int argc, char** argv) {
  CLI::App app{"specstate: the state of speculative decoding, on a real model"};
  app.name("specstate");
  app.set_version_flag("--version", SPECSTATE_VERSION);
  app.require_subcommand(0, 1);

  GenerateCommand generate;
  runtime::GenerateOptions& g = generate.options;
  std::string mode = "auto", proposal = "greedy";
  CLI::App* generate_app = app.add_subcommand("generate", "decode a prompt with the embedded model; text on stdout, report on stderr");
  generate_app->add_option("--prompt", generate.prompts, "prompt text (repeat for a batch)")
      ->take_all()
      ->expected(1)
      ->allow_extra_args(false);
  generate_app->add_option("--prompt-file", generate.prompt_files, "file with a prompt (repeat for a batch)")
      ->take_all()
      ->expected(1)
      ->allow_extra_args(false);
  generate_app->add_option("--max-new-tokens", g.max_new_tokens, "tokens to generate at most")
      ->check(number(1, 1 << 30, "an integer from 1 to 1073741824"))
      ->capture_default_str();
  generate_app->add_option("--mode", mode, "auto (what measures fastest), plain, dflash or dspark; a named mode is always followed")
      ->check(one_of({"auto", "plain", "dflash", "dspark"}))
      ->capture_default_str();
  generate_app->add_option("--temperature", g.temperature, "0: greedy")
      ->check(number(0.0, 1e6, "a number from 0 (greedy) to 1000000"))
      ->capture_default_str();
  generate_app->add_option("--seed", g.seed, "of sampling; equal seeds draw equal tokens in every mode")
      ->check(number<std::uint64_t>(0, ~0ull, "an integer of 0 or more"))
      ->capture_default_str();
  generate_app->add_option("--proposal", proposal, "greedy: the drafter's best ids; sampled: drawn from it, verified by rejection sampling")
      ->check(one_of({"greedy", "sampled"}))
      ->capture_default_str();
  generate_app->add_option("--device", generate.device, "cpu, or cuda: NVIDIA GPUs, one unless --tensor-parallel says more")
      ->check(one_of({"cpu", "cuda"}))
      ->capture_default_str();
  generate_app->add_option("--tensor-parallel", generate.tensor_parallel, "on GPUs: split the heads among so many, one process a card")
      ->check(number(1, 64, "an integer from 1 to 64"))
      ->capture_default_str();
  generate_app->add_option("--model", generate.model, "model folder (default: the embedded model)")->check(not_empty());
  generate_app->add_option("--hot-slots", g.hot_slots, "device rows that cache the KV of the host, per request and layer")
      ->check(number(1, 1 << 20, "an integer from 1 to 1048576"))
      ->capture_default_str();
  generate_app->add_option("--chunk", g.chunk, "prefill rows at once")
      ->check(number(1, 1 << 20, "an integer from 1 to 1048576"))
      ->capture_default_str();
  generate_app->add_option("--force-accept", g.force_accept, "for tests: commit exactly this many tokens a step where they fit")
      ->check(number(1, 1 << 20, "an integer from 1 to 1048576"));
  generate_app->add_flag("--check-lossless", g.check_lossless, "also decode plainly and compare; a difference exits 3");
  generate_app->add_flag("--deterministic", g.deterministic,
                         "on a GPU: every result has the bits of plain decoding there (implied by --check-lossless)");
  generate_app->add_option("--max-batch", g.max_batch, "on a GPU: most requests at once; further prompts wait for a place")
      ->check(number(1, 1024, "an integer from 1 to 1024"))
      ->capture_default_str();
  generate_app->add_option("--start-steps", g.start_steps, "for tests: the step before which each prompt enters the batch, e.g. 0,2,5")
      ->delimiter(',')
      ->check(number(0, 1 << 20, "integers from 0 to 1048576"));
  generate_app->add_option("--drop-steps", g.drop_steps, "for tests: the step before which each prompt is dropped, -1: never")
      ->delimiter(',')
      ->check(number(-1, 1 << 20, "integers from -1 to 1048576"));
  generate_app->add_option("--trace", generate.trace, "on a GPU: write where the time of one step goes as Chrome trace JSON")
      ->check(not_empty());
  generate_app->add_option("--json", generate.json, "write the report as JSON to a file, or - for stdout (instead of the text)")
      ->check(not_empty());

  DoctorOptions doctor;
  CLI::App* doctor_app = app.add_subcommand("doctor", "what this build can do on this machine, and what is missing");
  doctor_app->add_option("--model", doctor.model, "model folder (default: the embedded model)")->check(not_empty());
  doctor_app->add_option("--json", doctor.json, "write the report as JSON to a file, or - for stdout")->check(not_empty());

  BenchOptions bench;
  CLI::App* bench_app = app.add_subcommand(
      "bench",
      "measure operations beside their floors and peers.\nus: microseconds of a call; floor us: what this machine needs for it at least, "
      "measured in the same run;\n"
      "floor/us: the share of the floor in our time, 1.00 is perfect; behind them peers, with their time as a multiple of ours");
  bench_app
      ->add_option("family", bench.family,
                   "with --device cpu: draft_kv, engine, hisparse, kda, matmul; with --device cuda, which needs a GPU: accept, draft_kv, "
                   "hisparse, kda, step; or all of the device's")
      ->required();
  bench_app->add_option("--device", bench.device, "cpu, or cuda: one NVIDIA GPU")->check(one_of({"cpu", "cuda"}))->capture_default_str();
  bench_app->add_flag("--quick", bench.quick, "few and short samples: shows that it runs, not how fast");
  bench_app->add_option("--seconds", bench.seconds, "begin no further case of a family after so long; what was measured by then counts")
      ->check(number(0.001, 1e6, "a number of seconds from 0.001 to 1000000"));
  bench_app->add_flag("--record", bench.record, "merge into bench/results/<device>.json of this checkout");
  bench_app->add_option("--json", bench.json, "write the results as JSON to a file, or - for stdout")->check(not_empty());

  try {
    app.parse(argc, argv);
  } catch (const CLI::Success& e) {
    return app.exit(e);  // --help, --version
  } catch (const CLI::ExtrasError&) {
    const std::vector<std::string> rest = app.remaining(true);
    const std::string word = rest.empty() ? "" : rest.front();
    if (&deepest(app) == &app && word.rfind("-", 0) != 0)
      return usage(app, "expected one of the subcommands generate, bench and doctor, got '" + word + "'");
    return usage(app, "expected a known option, got '" + word + "'");
  } catch (const CLI::ParseError& e) {
    return usage(app, e.what());
  }

  if (generate_app->parsed()) {
    for (const runtime::Mode m : {runtime::Mode::kAuto, runtime::Mode::kPlain, runtime::Mode::kDFlash, runtime::Mode::kDSpark})
      if (mode == runtime::name_of(m)) g.mode = m;
    g.sampled_proposals = proposal == "sampled";
    if (generate.prompts.empty() && generate.prompt_files.empty())
      return usage(app, "expected --prompt TEXT or --prompt-file FILE, got neither");
    if (g.sampled_proposals && g.temperature <= 0)
      return usage(app, "--proposal sampled: expected --temperature above 0, got greedy decoding");
    if (g.sampled_proposals && (g.check_lossless || g.force_accept))
      return usage(app,
                   "--proposal sampled: expected neither --check-lossless nor --force-accept: it draws other tokens than plain decoding, "
                   "of the same distribution");
    if (g.force_accept && (g.mode == runtime::Mode::kAuto || g.mode == runtime::Mode::kPlain))
      return usage(app, "--force-accept: expected --mode dflash or dspark, got " + mode);
    if (generate.tensor_parallel > 1 && generate.device != "cuda")
      return usage(app, "--tensor-parallel: expected --device cuda, got " + generate.device);
    if (!generate.trace.empty() && generate.device != "cuda") return usage(app, "--trace: expected --device cuda, got " + generate.device);
    try {
      return run_generate(generate);
    } catch (const BadOption& e) {
      return usage(app, e.what());
    }
  }
  if (doctor_app->parsed()) return run_doctor(doctor);
  if (bench_app->parsed()) return run_bench(bench);
  return usage(app, "expected one of the subcommands generate, bench and doctor");
}

}  // namespace

int main(int argc, char** argv) {
  try {
    return run(argc, argv);
  } catch (const std::exception& e) {
    std::fprintf(stderr, "specstate: %s\n", one_line(e.what()).c_str());
    return kFailure;
  }
}
