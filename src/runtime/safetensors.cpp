#include "runtime/safetensors.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cstdio>
#include <cstring>

#include "core/match.hpp"
#include "runtime/json.hpp"

namespace specstate::runtime {

namespace {

// The public implementations refuse longer headers too.
constexpr std::uint64_t kMaxHeader = 100'000'000;
constexpr std::size_t kMaxRank = kMaxDims;

[[noreturn]] void fail(const std::string& name, const std::string& text) { core::throw_value(name + ": " + text); }

struct DTypeName {
  const char* text;
  DType dtype;
};
constexpr DTypeName kDTypes[] = {{"BF16", DType::kBFloat16},
                                 {"F32", DType::kFloat32},
                                 {"F16", DType::kFloat16},
                                 {"F64", DType::kFloat64},
                                 {"F8_E4M3", DType::kFloat8E4M3FN},
                                 {"I8", DType::kInt8},
                                 {"I16", DType::kInt16},
                                 {"I32", DType::kInt32},
                                 {"I64", DType::kInt64},
                                 {"U8", DType::kUInt8},
                                 {"U16", DType::kUInt16},
                                 {"U32", DType::kUInt32},
                                 {"U64", DType::kUInt64},
                                 {"BOOL", DType::kBool}};

StoredTensor parse_tensor(const Json& entry, const std::string& where, std::uint64_t data_size) {
  if (!entry.is_object()) fail(where, fmt::format("expected an object with dtype, shape and data_offsets, got {}.", entry.type_name()));
  StoredTensor t;
  const auto dtype = entry.find("dtype");
  if (dtype == entry.end() || !dtype->is_string()) fail(where, "expected dtype, a string.");
  const std::string& dtype_text = dtype->get_ref<const std::string&>();
  const auto* known = std::find_if(std::begin(kDTypes), std::end(kDTypes), [&](const DTypeName& n) { return dtype_text == n.text; });
  if (known == std::end(kDTypes)) fail(where, fmt::format("expected a known dtype, got '{}'.", shown_text(dtype_text)));
  t.dtype = known->dtype;

  const auto shape = entry.find("shape");
  if (shape == entry.end() || !shape->is_array()) fail(where, "expected shape, an array of sizes.");
  if (shape->size() > kMaxRank) fail(where, fmt::format("expected at most {} dimensions, got {}.", kMaxRank, shape->size()));
  std::uint64_t bytes = static_cast<std::uint64_t>(size_of(t.dtype));
  bool empty = false;
  for (const Json& n : *shape) {
    if (!n.is_number_unsigned()) fail(where, "expected shape of non-negative integers.");
    const std::uint64_t v = n.get<std::uint64_t>();
    if (v == 0)
      empty = true;
    else if (v > (std::uint64_t{1} << 62) || bytes > (std::uint64_t{1} << 62) / v)
      fail(where, "the shape's byte count overflows.");
    else
      bytes *= v;
    t.shape.push_back(static_cast<std::int64_t>(v));
  }
  if (empty) bytes = 0;

  const auto offsets = entry.find("data_offsets");
  if (offsets == entry.end() || !offsets->is_array() || offsets->size() != 2 || !(*offsets)[0].is_number_unsigned() ||
      !(*offsets)[1].is_number_unsigned())
    fail(where, "expected data_offsets, two non-negative integers.");
  t.begin = (*offsets)[0].get<std::uint64_t>();
  t.end = (*offsets)[1].get<std::uint64_t>();
  if (t.begin > t.end || t.end > data_size)
    fail(where, fmt::format("expected data_offsets within 0..{} (is the file truncated?), got [{}, {}].", data_size, t.begin, t.end));
  if (t.end - t.begin != bytes)
    fail(where, fmt::format("{} {} takes {} bytes, but data_offsets [{}, {}] span {}.", name_of(t.dtype), t.shape, bytes, t.begin, t.end,
                            t.end - t.begin));
  return t;
}

}  // namespace

SafetensorsIndex parse_safetensors(std::span<const std::byte> file, const std::string& name) {
  if (file.size() < 8) fail(name, fmt::format("expected at least 8 bytes of header length, got {} bytes.", file.size()));
  std::uint64_t header = 0;
  for (int i = 7; i >= 0; --i) header = header << 8 | std::to_integer<std::uint64_t>(file[static_cast<std::size_t>(i)]);
  if (header > kMaxHeader || header > file.size() - 8)
    fail(name, fmt::format("expected a header length of at most {} (is the file truncated, or not safetensors?), got {}.",
                           std::min<std::uint64_t>(kMaxHeader, file.size() - 8), header));
  const char* text = reinterpret_cast<const char*>(file.data()) + 8;
  if (header == 0 || text[0] != '{') fail(name, "expected a JSON object as header.");

  SafetensorsIndex index;
  index.data_begin = 8 + header;
  const std::uint64_t data_size = file.size() - index.data_begin;

  const Json json = parse_json({text, header}, name);
  if (!json.is_object()) fail(name, "expected a JSON object as header.");

  for (const auto& [key, entry] : json.items()) {
    if (key == "__metadata__") {
      if (!entry.is_object()) fail(name, "expected __metadata__ to be an object of strings.");
      for (const auto& [k, v] : entry.items())
        if (!v.is_string()) fail(name, "expected __metadata__ to be an object of strings.");
      continue;
    }
    index.tensors.emplace(key, parse_tensor(entry, fmt::format("{}: tensor '{}'", name, shown_text(key)), data_size));
  }

  // The tensors must tile the data: an overlap or a hole means that offsets were damaged.
  std::vector<std::pair<const std::string*, const StoredTensor*>> order;
  for (const auto& [key, t] : index.tensors) order.emplace_back(&key, &t);
  std::sort(order.begin(), order.end(), [](const auto& a, const auto& b) {
    return std::pair(a.second->begin, a.second->end) < std::pair(b.second->begin, b.second->end);
  });
  std::uint64_t at = 0;
  for (const auto& [key, t] : order) {
    if (t->begin != at)
      fail(name, fmt::format("tensor '{}': expected data_offsets to begin at {} ({}), got {}.", shown_text(*key), at,
                             t->begin < at ? "it overlaps the tensor before it" : "bytes before it belong to no tensor", t->begin));
    at = t->end;
  }
  if (at != data_size) fail(name, fmt::format("expected {} bytes of data after the header, got {}.", at, data_size));
  return index;
}

Safetensors::Safetensors(const std::string& path) : path_(path), file_(path), index_(parse_safetensors(file_.bytes(), path)) {}

const StoredTensor* Safetensors::find(const std::string& tensor) const {
  const auto it = index_.tensors.find(tensor);
  return it == index_.tensors.end() ? nullptr : &it->second;
}

std::span<const std::byte> Safetensors::get(const std::string& tensor, DType dtype, std::span<const std::int64_t> shape) const {
  const StoredTensor* t = find(tensor);
  const auto expected = [&] {
    std::string s;
    for (const std::int64_t n : shape) s += (s.empty() ? "" : ", ") + (n < 0 ? std::string("any") : std::to_string(n));
    return fmt::format("{} [{}]", name_of(dtype), s);
  };
  if (!t) fail(path_, fmt::format("tensor '{}': expected {}, got nothing of that name.", tensor, expected()));
  bool fits = t->dtype == dtype && t->shape.size() == shape.size();
  for (std::size_t i = 0; fits && i < shape.size(); ++i) fits = shape[i] < 0 ? t->shape[i] >= 1 : t->shape[i] == shape[i];
  if (!fits) fail(path_, fmt::format("tensor '{}': expected {}, got {} {}.", tensor, expected(), name_of(t->dtype), t->shape));
  return file_.bytes().subspan(index_.data_begin + t->begin, t->end - t->begin);
}

void write_safetensors(const std::string& path, std::span<const TensorToStore> tensors) {
  nlohmann::ordered_json header;
  std::uint64_t at = 0;
  for (const TensorToStore& t : tensors) {
    const auto* known = std::find_if(std::begin(kDTypes), std::end(kDTypes), [&](const DTypeName& n) { return n.dtype == t.dtype; });
    header[t.name] = {{"dtype", known->text}, {"shape", t.shape}, {"data_offsets", {at, at + t.bytes.size()}}};
    at += t.bytes.size();
  }
  std::string text = tensors.empty() ? "{}" : header.dump();
  text.append((8 - text.size() % 8) % 8, ' ');
  std::FILE* f = std::fopen(path.c_str(), "wb");
  if (!f) core::throw_runtime(fmt::format("{}: cannot create.", path));
  std::uint64_t length = text.size();
  std::uint8_t prefix[8];
  for (int i = 0; i < 8; ++i) prefix[i] = static_cast<std::uint8_t>(length >> 8 * i);
  bool ok = std::fwrite(prefix, 1, 8, f) == 8 && std::fwrite(text.data(), 1, text.size(), f) == text.size();
  for (const TensorToStore& t : tensors) ok = ok && std::fwrite(t.bytes.data(), 1, t.bytes.size(), f) == t.bytes.size();
  if (std::fclose(f) != 0 || !ok) core::throw_runtime(fmt::format("{}: cannot write.", path));
}

}  // namespace specstate::runtime
