#include "doctor.hpp"

#include <fmt/format.h>
#include <hwy/targets.h>

#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <vector>

#include "core/dispatch.hpp"
#include "cuda_probe.hpp"
#include "output.hpp"
#include "runtime/checkpoint.hpp"
#include "specstate/error.hpp"
#include "specstate/executor.hpp"
#include "specstate/runtime.hpp"
#include "specstate/version.hpp"

namespace specstate::cli {

namespace {

/// The best instruction set that both this build and this processor have: the one Highway takes.
std::string simd_in_use() {
  const std::int64_t both = hwy::SupportedTargets() & HWY_TARGETS;
  const std::string name = hwy::TargetName(both & -both);                 // a lower bit is a better target
  return name.rfind("AVX3", 0) == 0 ? "AVX-512" + name.substr(4) : name;  // Highway's name of it
}

/// "g++ 12.2.0"
std::string host_compiler() {
#if defined(__clang__)
  return __VERSION__;
#else
  return "g++ " __VERSION__;
#endif
}

#if defined(SPECSTATE_CUDA_TOOLKIT)
constexpr const char *kToolkit = SPECSTATE_CUDA_TOOLKIT, *kCudaTargets = SPECSTATE_CUDA_TARGETS;
#else
constexpr const char *kToolkit = "", *kCudaTargets = "";
#endif
const int kToolkitMajor = std::atoi(kToolkit);

/// A CUDA runtime works on every driver of its major version (NVIDIA's minor version compatibility).
std::string driver_needed() {
  const char* first = kToolkitMajor == 12 ? " (525 or newer)" : kToolkitMajor == 13 ? " (580 or newer)" : "";
  return fmt::format("a driver for CUDA {}{}", kToolkitMajor, first);
}

}  // namespace

int run_doctor(const DoctorOptions& options) {
  check_json(options.json);
  std::vector<std::string> missing;
  nlohmann::ordered_json j;
  std::string text;
  const auto line = [&](const char* what, const std::string& value) { text += fmt::format("{:<14}{}\n", what, value); };

  j["version"] = SPECSTATE_VERSION;
  j["build"] = {{"cuda", core::cuda_built()}, {"cuda_toolkit", kToolkit}, {"cuda_targets", kCudaTargets}, {"compiler", host_compiler()}};
  if (core::cuda_built()) j["build"]["driver_needed"] = driver_needed();
  line("specstate",
       fmt::format("{}, {} CUDA kernels; C++ by {}", SPECSTATE_VERSION, core::cuda_built() ? "with" : "without", host_compiler()));
  if (core::cuda_built()) line("CUDA", fmt::format("kernels for {} by toolkit {}; needs {}", kCudaTargets, kToolkit, driver_needed()));

  j["cpu"] = {{"simd", simd_in_use()}, {"threads", executor().concurrency()}};
  line("CPU", fmt::format("{} instructions, {} threads", simd_in_use(), executor().concurrency()));

  const CudaReport cuda = probe_cuda();
  auto& g = j["gpu"] = {{"driver_found", cuda.driver_found}, {"driver_version", cuda.driver_version}, {"problem", cuda.problem}};
  g["devices"] = nlohmann::ordered_json::array();
  for (const GpuReport& d : cuda.devices) {
    g["devices"].push_back({{"name", d.name},
                            {"compute_capability", fmt::format("{}.{}", d.major, d.minor)},
                            {"multiprocessors", d.multiprocessors},
                            {"memory_gib", d.memory_gib},
                            {"pinned_to_device_gbps", d.pinned_to_device_gbps},
                            {"device_to_pinned_gbps", d.device_to_pinned_gbps},
                            {"problem", d.problem}});
    line("GPU", fmt::format("{}, compute capability {}.{}, {} SMs, {:.0f} GiB", d.name, d.major, d.minor, d.multiprocessors, d.memory_gib));
    line("  host link", d.problem.empty() ? fmt::format("{:.1f} GB/s from pinned memory, {:.1f} GB/s back", d.pinned_to_device_gbps,
                                                        d.device_to_pinned_gbps)
                                          : "not measured: " + d.problem);
  }
  if (cuda.devices.empty()) {
    line("GPU", "no GPU: " + cuda.problem);
    missing.push_back("a GPU: " + cuda.problem + " (the CPU backend needs none)");
  } else if (!core::cuda_built()) {
    missing.push_back("CUDA kernels: this build has the CPU backend only; build it where nvcc is");
  } else if (cuda.driver_version / 1000 < kToolkitMajor) {
    missing.push_back(
        fmt::format("{}: this one is for CUDA {}.{}", driver_needed(), cuda.driver_version / 1000, cuda.driver_version % 1000 / 10));
  }

  const std::string model = options.model.empty() ? runtime::find_embedded_model() : options.model;
  bool usable = false;
  std::string state = "not found";
  if (!model.empty()) {
    try {
      state = runtime::describe_checkpoint(model);
      usable = true;
    } catch (const Error& e) {
      state = e.what();
    }
  }
  j["model"] = {{"path", model}, {"usable", usable}, {"state", state}};
  line("model", model.empty() ? "not found" : model + ": " + state);
  if (!usable) missing.push_back("the embedded model (models/specstate-bytes): " + state + "; name a folder with --model");

  j["missing"] = missing;
  for (const std::string& m : missing) line("missing", m);
  if (missing.empty()) line("missing", "nothing");

  if (!options.json.empty()) write_json(options.json, j.dump(2, ' ', false, nlohmann::json::error_handler_t::replace));
  if (options.json != "-") std::fputs(text.c_str(), stdout);
  finish_stdout();
  // Absent parts are what a doctor reports, not a failure of the doctor; only a folder that was named must be usable.
  return options.model.empty() || usable ? kOk : kFailure;
}

}  // namespace specstate::cli
