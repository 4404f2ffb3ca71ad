#include "output.hpp"

#include <unistd.h>

#include <cstdio>
#include <filesystem>
#include <memory>

#include "specstate/error.hpp"

namespace specstate::cli {

void check_json(const std::string& file) {
  if (file.empty() || file == "-") return;
  namespace fs = std::filesystem;
  const fs::path path(file), folder = path.has_parent_path() ? path.parent_path() : fs::path(".");
  std::error_code error;
  const bool there = fs::exists(path, error);
  if (there ? fs::is_directory(path, error) || ::access(file.c_str(), W_OK) != 0 : ::access(folder.c_str(), W_OK | X_OK) != 0)
    throw Error(ErrorKind::kRuntime, "--json: cannot create '" + file + "'.");
}

void write_json(const std::string& file, const std::string& text) {
  std::FILE* f = file == "-" ? stdout : std::fopen(file.c_str(), "wb");
  if (!f) throw Error(ErrorKind::kRuntime, "--json: cannot create '" + file + "'.");
  bool ok = std::fwrite(text.data(), 1, text.size(), f) == text.size() && std::fputc('\n', f) != EOF && std::fflush(f) == 0;
  if (f != stdout) ok = std::fclose(f) == 0 && ok;
  if (!ok) throw Error(ErrorKind::kRuntime, "--json: cannot write '" + file + "'.");
}

void finish_stdout() {
  if (std::fflush(stdout) != 0 || std::ferror(stdout)) throw Error(ErrorKind::kRuntime, "cannot write to stdout.");
}

}  // namespace specstate::cli
