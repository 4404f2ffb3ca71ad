// config.json of the target and of the drafters, on any bytes; the first byte chooses the reader.
#include "fuzz.hpp"
#include "runtime/config.hpp"

using namespace specstate;

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  if (size == 0) return 0;
  const bool drafter = data[0] == 'd';
  const std::string json(reinterpret_cast<const char*>(data) + 1, size - 1);
  try {
    if (drafter) {
      const runtime::DraftConfig c = runtime::parse_draft_config(json, "fuzz");
      if (c.layers < 1 || c.kv_heads < 1 || c.heads % c.kv_heads != 0 || c.proposals() < 1 || static_cast<int>(c.window.size()) != c.layers)
        fuzz::fail("an impossible drafter was taken");
    } else {
      const runtime::TargetConfig c = runtime::parse_target_config(json, "fuzz");
      if (c.layers < 1 || c.top_k < 1 || static_cast<int>(c.is_kda.size()) != c.layers || static_cast<int>(c.anchor_of.size()) != c.layers)
        fuzz::fail("an impossible target was taken");
    }
  } catch (const Error& e) {
    if (std::strncmp(e.what(), "fuzz", 4) != 0) fuzz::fail("the error does not name the file");
  }
  return 0;
}
