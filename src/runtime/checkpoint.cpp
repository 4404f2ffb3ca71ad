#include "runtime/checkpoint.hpp"

#include <fmt/format.h>

#include <filesystem>

#include "core/match.hpp"

namespace specstate::runtime {

namespace {

// Configurations are a few kilobytes.
constexpr std::size_t kMaxConfig = 1 << 20;

std::string in(const std::string& folder, const char* file) { return (std::filesystem::path(folder) / file).string(); }

bool there(const std::string& path) {
  std::error_code error;
  return std::filesystem::exists(path, error);
}

}  // namespace

std::string describe_checkpoint(const std::string& folder) {
  if (!there(in(folder, "config.json")))
    core::throw_runtime(fmt::format("{}: expected a model folder with config.json and model.safetensors, found no config.json.", folder));
  const TargetConfig target = parse_target_config(read_text(in(folder, "config.json"), kMaxConfig), in(folder, "config.json"));
  const Safetensors weights(in(folder, "model.safetensors"));
  std::string text = fmt::format("{} layers, {} tensors", target.layers, weights.tensors().size());
  for (const char* part : {"dflash", "dspark"}) {
    const std::string sub = in(folder, part), config = in(sub, "config.json");
    if (!there(config)) continue;
    check_drafter_fits(parse_draft_config(read_text(config, kMaxConfig), config), target, config);
    const Safetensors drafter(in(sub, "model.safetensors"));
    text += fmt::format(", drafter {}", part);
  }
  return text;
}

}  // namespace specstate::runtime
