// The command line on any words (one a line of the input): cli/main.cpp as it is, with subcommands that do nothing.
// It must end with status 0 or 2, and bad usage with exactly one line on stderr.
#include <cstdlib>
#include <string>
#include <vector>

#define main specstate_main
#include "../../cli/main.cpp"
#undef main

#include "fuzz.hpp"

namespace specstate::cli {
#if __has_include("../../cli/generate.hpp")
int run_generate(const GenerateCommand&) { return kOk; }
#endif
int run_bench(const BenchOptions&) { return kOk; }
int run_doctor(const DoctorOptions&) { return kOk; }
}  // namespace specstate::cli

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  std::vector<std::string> words{"specstate"};
  std::string word;
  for (std::size_t i = 0; i < size; ++i) {
    if (data[i] == '\n') {
      words.push_back(word);
      word.clear();
    } else if (data[i] != 0) {
      word += static_cast<char>(data[i]);
    }
  }
  if (!word.empty()) words.push_back(word);
  std::vector<char*> argv;
  for (std::string& w : words) argv.push_back(w.data());
  argv.push_back(nullptr);

  char* text = nullptr;
  std::size_t length = 0;
  std::FILE *const out = stdout, *const err = stderr;
  stdout = std::fopen("/dev/null", "w");
  stderr = open_memstream(&text, &length);
  const int status = specstate_main(static_cast<int>(words.size()), argv.data());
  std::fclose(stderr), std::fclose(stdout);
  stdout = out, stderr = err;
  const std::string said(text, length);
  std::free(text);
  if (status != specstate::cli::kOk && status != specstate::cli::kUsage) specstate::fuzz::fail("neither status 0 nor 2");
  if (status == specstate::cli::kUsage && (said.empty() || said.find('\n') != said.size() - 1))
    specstate::fuzz::fail("bad usage without its one line");
  return 0;
}
