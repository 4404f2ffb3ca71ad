#pragma once
#include <string>

namespace specstate::cli {

struct BenchOptions {
  std::string family;          // or "all"
  std::string device = "cpu";  // cpu or cuda
  std::string json;            // file or "-"; empty: a table only
  double seconds = 0;          // > 0: most for a family
  bool quick = false;          // shows that it runs, not how fast; never recorded
  bool record = false;         // merge into bench/results/<device>.json of the checkout that this is run in
};
/// Measures a family's operations beside their floors and peers. Returns the exit status.
int run_bench(const BenchOptions& options);

}  // namespace specstate::cli
