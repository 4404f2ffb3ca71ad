// The safetensors reader on any bytes: it throws specstate::Error, or what it returns lies inside the file and tiles it.
#include "fuzz.hpp"
#include "runtime/safetensors.hpp"

using namespace specstate;

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  // A copy of exactly this size: a read behind the end is seen.
  std::vector<std::byte> file(size);
  if (size > 0) std::memcpy(file.data(), data, size);
  file.shrink_to_fit();
  runtime::SafetensorsIndex index;
  try {
    index = runtime::parse_safetensors(file, "fuzz");
  } catch (const Error& e) {
    if (std::strncmp(e.what(), "fuzz", 4) != 0) fuzz::fail("the error does not name the file");
    return 0;
  }
  std::uint64_t sum = 0;
  for (const auto& [name, t] : index.tensors) {
    if (t.begin > t.end || index.data_begin + t.end > size) fuzz::fail("a tensor outside the file");
    __int128 elements = 1;
    for (const std::int64_t n : t.shape) elements *= n;
    if (elements * size_of(t.dtype) != static_cast<__int128>(t.end - t.begin)) fuzz::fail("a tensor whose bytes are not its shape");
    sum += t.end - t.begin;
  }
  if (index.data_begin + sum != size) fuzz::fail("tensors that do not tile the data");
  return 0;
}
