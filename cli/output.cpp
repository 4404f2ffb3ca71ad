#include "output.hpp"

#include <cstdio>
#include <memory>

#include "specstate/error.hpp"

namespace specstate::cli {

void write_json(const std::string& file, const std::string& text) {
  std::FILE* f = file == "-" ? stdout : std::fopen(file.c_str(), "wb");
  if (!f) throw Error(ErrorKind::kRuntime, "--json: cannot create '" + file + "'.");
  bool ok = std::fwrite(text.data(), 1, text.size(), f) == text.size() && std::fputc('\n', f) != EOF && std::fflush(f) == 0;
  if (f != stdout) ok = std::fclose(f) == 0 && ok;
  if (!ok) throw Error(ErrorKind::kRuntime, "--json: cannot write '" + file + "'.");
}

}  // namespace specstate::cli
