#pragma once
#include <string>

namespace specstate::cli {

struct DoctorOptions {
  std::string model;  // folder; empty: the embedded one
  std::string json;   // file or "-"; empty: text only
};
/// What this build can do on this machine, and what is missing. Returns the exit status.
int run_doctor(const DoctorOptions& options);

}  // namespace specstate::cli
