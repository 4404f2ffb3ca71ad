#include "bench.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cctype>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <exception>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <optional>

#include "bench/harness.hpp"
#include "core/dispatch.hpp"
#include "cuda_probe.hpp"
#include "output.hpp"
#include "specstate/error.hpp"

namespace specstate::cli {

namespace {

namespace fs = std::filesystem;
using Json = nlohmann::ordered_json;

std::string today() {
  const std::time_t now = std::time(nullptr);
  char text[16];
  std::strftime(text, sizeof text, "%Y-%m-%d", std::gmtime(&now));
  return text;
}

double rounded(double x) { return std::round(x * 1000) / 1000; }

/// The digests that the build wrote beside this executable, so that a result names the sources it was built from.
Json digests() {
  std::ifstream file(fs::read_symlink("/proc/self/exe").parent_path() / "source_digests.json");
  return file ? Json::parse(file, nullptr, false) : Json();
}

std::string command_of(const BenchOptions& o, const std::string& family) {
  const char* threads = std::getenv("SPECSTATE_NUM_THREADS");
  return fmt::format("{}specstate bench {} --device {}{}", threads ? fmt::format("SPECSTATE_NUM_THREADS={} ", threads) : "", family,
                     o.device, o.quick ? " --quick" : "") +
         (o.seconds > 0 ? fmt::format(" --seconds {}", o.seconds) : "");
}

/// `fresh` into the recorded file: a case measured again replaces its older self, the others stay. A file of another machine is
/// replaced: one file is one machine.
void record(const fs::path& path, const Json& fresh) {
  Json all = fresh;
  if (std::ifstream file(path); file) {
    const Json old = Json::parse(file, nullptr, false);
    const bool same_machine = old.is_object() && old.value("device", "") == fresh["device"];
    if (!same_machine) std::fprintf(stderr, "specstate bench: %s was measured on another machine and is replaced\n", path.c_str());
    if (same_machine) {
      std::map<std::string, Json> by_case;
      for (const Json* from : {&old, &fresh})
        for (const Json& r : (*from)["results"]) by_case[r["case"]] = r;
      all["ceilings"] = old.value("ceilings", Json::object());
      all["ceilings"].update(fresh["ceilings"]);
      all["results"] = Json::array();
      for (auto& [name, r] : by_case) all["results"].push_back(r);
    }
  }
  all.erase("cut_off");  // of this run; in the file each case has its date
  fs::create_directories(path.parent_path());
  const fs::path unfinished = path.string() + ".new";
  write_json(unfinished.string(), all.dump(1));
  fs::rename(unfinished, path);
}

/// The checkout around the current folder.
fs::path checkout() {
  for (fs::path p = fs::current_path();; p = p.parent_path()) {
    if (fs::exists(p / "tools" / "source_digest.py")) return p;
    if (p == p.parent_path()) throw Error(ErrorKind::kRuntime, "--record: expected to be run inside a checkout of specstate.");
  }
}

/// A result goes only to a checkout of the sources that this executable was built from: by its own digests of the families to be measured.
template <class Families>
void check_sources(const fs::path& root, const Json& built, const BenchOptions& options, const Families& families) {
  std::string script = (root / "tools" / "source_digest.py").string(), quoted;
  for (const char c : script) quoted += c == '\'' ? "'\\''" : std::string(1, c);
  std::string text;
  if (std::FILE* out = ::popen(("python3 '" + quoted + "' --all 2>/dev/null").c_str(), "r")) {
    char piece[512];
    while (const std::size_t n = std::fread(piece, 1, sizeof piece, out)) text.append(piece, n);
    ::pclose(out);
  }
  const Json there = Json::parse(text, nullptr, false);
  if (!there.is_object())
    throw Error(ErrorKind::kRuntime, fmt::format("--record: expected digests of the checkout's sources, got none from {} --all.", script));
  for (const auto& [name, run] : families) {
    if (options.family != "all" && options.family != name) continue;
    const std::string mine = built.value(name, "none"), theirs = there.value(name, "none");
    if (mine != theirs)
      throw Error(ErrorKind::kRuntime, fmt::format("--record: expected a checkout of this executable's sources ({} {}), got {} with {}.",
                                                   name, mine, root.string(), theirs));
  }
}

/// "NVIDIA H200" -> "h200.json"
std::string file_of(const std::string& gpu) {
  std::string name;
  for (const char c : gpu.substr(gpu.rfind(' ') + 1)) name += static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
  return name + ".json";
}

std::string line_of(const bench::Result& r, std::size_t width) {
  std::string text = fmt::format("{:<{}} {:>12.2f}", r.name, width, r.ours_us);
  text += r.floor_us > 0 ? fmt::format(" {:>12.2f} {:>8.2f}", r.floor_us, r.floor_us / r.ours_us) : fmt::format(" {:>12} {:>8}", "-", "-");
  for (const auto& [name, us] : r.peers) text += fmt::format("   {} {:.2f} ({:.2f}x)", name, us, us / r.ours_us);
  return text;
}

}  // namespace

int run_bench(const BenchOptions& options) {
  const bool on_gpu = options.device == "cuda";
  const auto& families = on_gpu ? bench::gpu_families() : bench::families();
  if (on_gpu && !core::cuda_built())
    throw Error(ErrorKind::kNotImplemented,
                "bench: this build of specstate has no CUDA kernels; use --device cpu, or build it with them: `make build` where nvcc is.");
  if (on_gpu)
    if (const CudaReport cuda = probe_cuda(0); cuda.devices.empty())
      throw Error(ErrorKind::kCuda, "bench: --device: expected a GPU for cuda, got none: " + cuda.problem + ".");
  if (options.family != "all" && !families.count(options.family)) {
    std::string names;
    for (const auto& [name, run] : families) names += name + ", ";
    const bool other = (on_gpu ? bench::families() : bench::gpu_families()).count(options.family) > 0;
    std::fprintf(stderr, "specstate bench: family: expected %sor all with --device %s, got '%s'%s\n", names.c_str(), options.device.c_str(),
                 options.family.c_str(),
                 !other   ? ""
                 : on_gpu ? ", which needs --device cpu"
                          : ", which needs --device cuda and a GPU");
    return kUsage;
  }
  if (options.quick && options.record) {
    std::fprintf(stderr, "specstate bench: --record: expected full measurements, got --quick\n");
    return kUsage;
  }
  check_json(options.json);
  const std::optional<fs::path> root = options.record ? std::optional(checkout()) : std::nullopt;
  const Json digest = digests();
  if (options.record && !digest.is_object())
    throw Error(ErrorKind::kRuntime, "--record: source_digests.json is not beside this executable; build with python3 at hand.");
  if (root) check_sources(*root, digest, options, families);

  std::FILE* table = options.json == "-" ? stderr : stdout;
  Json report;
  const std::string device = on_gpu ? bench::gpu_machine().name() : bench::cpu_name();
  report["device"] = device;
  report["date"] = today();
  report["ceilings"] = Json::object();
  report["results"] = Json::array();
  fmt::print(table, "{}\n", device);
  std::fflush(table);
  std::exception_ptr fault;
  for (const auto& [name, run] : families) {
    if (fault || (options.family != "all" && options.family != name)) continue;
    bench::Report r(name, {.device = options.device, .quick = options.quick, .seconds = options.seconds});
    try {
      run(r);
    } catch (const bench::TimeIsOver&) {
      std::fprintf(stderr, "specstate bench: %s ends after --seconds %g: what is not in the table was not measured\n", name.c_str(),
                   options.seconds);
      report["cut_off"][name] = options.seconds;
    } catch (...) {
      fault = std::current_exception();  // what was measured before it is reported first, but not recorded
    }
    std::size_t width = 0;
    for (const bench::Result& result : r.results()) width = std::max(width, result.name.size());
    fmt::print(table, "{:<{}} {:>12} {:>12} {:>8}\n", "case", width, "us", "floor us", "floor/us");
    for (const bench::Result& result : r.results()) {
      fmt::print(table, "{}\n", line_of(result, width));
      Json peers = Json::object();
      for (const auto& [peer, us] : result.peers) peers[peer] = rounded(us);
      report["results"].push_back({{"case", result.name},
                                   {"ours_us", rounded(result.ours_us)},
                                   {"floor_us", rounded(result.floor_us)},
                                   {"floor", result.floor},
                                   {"peers", peers},
                                   {"source_digest", digest.is_object() ? digest.value(name, "unknown") : "unknown"},
                                   {"date", today()},
                                   {"command", command_of(options, name)}});
      for (const auto& [what, value] : result.more) report["results"].back()[what] = value;
    }
    if (!on_gpu) {
      const bench::Ceilings& c = r.ceilings();
      report["ceilings"][fmt::format("threads={}", c.threads)] = {{"fma_gflops", rounded(c.fma_gflops)},
                                                                  {"read_l3_gbs", rounded(c.read_l3_gbs)},
                                                                  {"read_memory_gbs", rounded(c.read_memory_gbs)},
                                                                  {"memcpy_gbs", rounded(c.memcpy_gbs)}};
      fmt::print(table, "{} threads at most: {:.0f} GFLOP/s, reads {:.0f} GB/s from L3 and {:.1f} GB/s from memory, memcpy {:.1f} GB/s\n",
                 c.threads, c.fma_gflops, c.read_l3_gbs, c.read_memory_gbs, c.memcpy_gbs);
    }
  }
  if (on_gpu && !fault) {
    for (const auto& [what, value] : bench::gpu_machine().ceilings(options.quick)) {
      report["ceilings"][what] = rounded(value);
      fmt::print(table, "at most: {} {:.1f}\n", what, value);
    }
  }
  if (!options.json.empty()) write_json(options.json, report.dump(1));
  if (fault) std::rethrow_exception(fault);
  if (root) record(*root / "bench" / "results" / (on_gpu ? file_of(device) : "cpu.json"), report);
  finish_stdout();
  return kOk;
}

}  // namespace specstate::cli
