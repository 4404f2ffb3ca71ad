#pragma once
#include <stdexcept>
#include <string>
#include <vector>

#include "specstate/runtime.hpp"

namespace specstate::cli {

/// An option that only the model can judge: bad usage, as if the command line had been refused.
struct BadOption : std::runtime_error {
  using std::runtime_error::runtime_error;
};

struct GenerateCommand {
  std::vector<std::string> prompts;       // texts
  std::vector<std::string> prompt_files;  // their contents follow the texts
  std::string model;                      // folder; empty: the embedded one
  std::string device = "cpu";
  int tensor_parallel = 1;  // processes with a GPU each
  std::string json;         // file or "-"; empty: none
  std::string trace;        // the same, for Chrome trace JSON of one step on a GPU
  runtime::GenerateOptions options;
};
/// Text on stdout, report on stderr. Returns the exit status.
int run_generate(const GenerateCommand& command);

}  // namespace specstate::cli
