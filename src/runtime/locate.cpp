// Where the embedded model is: beside the build (…/models), or installed (…/share/specstate/models).
#include <climits>
#include <filesystem>
#include <system_error>

#include "specstate/runtime.hpp"

namespace specstate::runtime {

std::string find_embedded_model() {
  namespace fs = std::filesystem;
  std::error_code error;
  const fs::path self = fs::read_symlink("/proc/self/exe", error);
  if (error) return "";
  const fs::path inside = "models/specstate-bytes";
  const auto there = [&](const fs::path& p) { return fs::exists(p / "config.json", error); };
  const fs::path installed = self.parent_path().parent_path() / "share/specstate" / inside;
  if (there(installed)) return installed.string();
  // A build tree: <repository>/build/<preset>/specstate, tests one folder deeper.
  fs::path folder = self.parent_path();
  for (int up = 0; up < 4; ++up, folder = folder.parent_path())
    if (there(folder / inside)) return (folder / inside).string();
  return "";
}

const char* name_of(Mode mode) noexcept {
  switch (mode) {
    case Mode::kPlain: return "plain";
    case Mode::kDFlash: return "dflash";
    case Mode::kDSpark: return "dspark";
    default: return "auto";
  }
}

}  // namespace specstate::runtime
