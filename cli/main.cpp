// The command line. CLI11 is included here and nowhere else (it costs 9 s a file); each subcommand takes a plain struct.
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <charconv>
#include <cmath>
#include <cstdio>
#include <exception>
#include <string>

#include "bench.hpp"
#include "doctor.hpp"
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

int usage(const CLI::App& app, const std::string& what) {
  const CLI::App* at = &app;
  while (!at->get_subcommands().empty()) at = at->get_subcommands().front();
  const std::string command = at == &app ? "specstate" : "specstate " + at->get_name();
  std::fprintf(stderr, "%s: %s (see `%s --help`)\n", command.c_str(), one_line(what).c_str(), command.c_str());
  return kUsage;
}

int run(int argc, char** argv) {
  CLI::App app{"specstate: the state of speculative decoding, on real models"};
  app.set_version_flag("--version", SPECSTATE_VERSION);
  app.require_subcommand(0, 1);

  DoctorOptions doctor;
  CLI::App* doctor_app = app.add_subcommand("doctor", "what this build can do on this machine, and what is missing");
  doctor_app->add_option("--model", doctor.model, "model folder (default: the embedded model)");
  doctor_app->add_option("--json", doctor.json, "write the report as JSON to a file, or - for stdout");

  BenchOptions bench;
  CLI::App* bench_app = app.add_subcommand("bench", "measure operations beside their floors and peers");
  bench_app->add_option("family", bench.family, "matmul, ... or all")->required();
  bench_app->add_option("--device", bench.device, "cpu or cuda")->check(CLI::IsMember({"cpu", "cuda"}));
  bench_app->add_flag("--quick", bench.quick, "few and short samples: shows that it runs, not how fast");
  bench_app->add_flag("--record", bench.record, "merge into bench/results/<device>.json of this checkout");
  bench_app->add_option("--json", bench.json, "write the results as JSON to a file, or - for stdout");

  try {
    app.parse(argc, argv);
  } catch (const CLI::Success& e) {
    return app.exit(e);  // --help, --version
  } catch (const CLI::ExtrasError&) {
    const CLI::App* at = &app;
    while (!at->get_subcommands().empty()) at = at->get_subcommands().front();
    std::vector<std::string> rest = app.remaining(true);
    const std::string word = rest.empty() ? "" : rest.front();
    return usage(app, at == &app ? "expected a subcommand, got '" + word + "'" : "expected the options of --help, got '" + word + "'");
  } catch (const CLI::ParseError& e) {
    return usage(app, e.what());
  }

  if (doctor_app->parsed()) return run_doctor(doctor);
  if (bench_app->parsed()) return run_bench(bench);
  return usage(app, "expected a subcommand: generate, bench or doctor");
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
