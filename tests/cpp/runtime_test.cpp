// Checkpoint reading: what is right is read exactly, and every way of being wrong is one clear Error.
#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

#include <cstring>
#include <filesystem>
#include <fstream>
#include <string>

#include "runtime/config.hpp"
#include "runtime/safetensors.hpp"
#include "specstate/error.hpp"
#include "text_of.hpp"

using namespace specstate;
using namespace specstate::runtime;
using specstate::testing::text_of;

namespace {

std::string file_of(const std::string& header, std::size_t data) {
  std::string s(8, '\0');
  for (int i = 0; i < 8; ++i) s[static_cast<std::size_t>(i)] = static_cast<char>(header.size() >> 8 * i);
  return s + header + std::string(data, '\1');
}

std::string refusal(const std::string& file) {
  return text_of([&] { parse_safetensors(std::as_bytes(std::span(file)), "f"); });
}

TEST(Safetensors, ReadsWhatItWrote) {
  const std::string path = (std::filesystem::temp_directory_path() / "specstate_runtime_test.safetensors").string();
  const std::vector<float> a{1.5f, -2.0f, 3.25f, 0.0f, 5.0f, 6.0f};
  const std::vector<std::uint16_t> b{0x3F80, 0xBF80};
  const std::vector<TensorToStore> tensors{{"a", DType::kFloat32, {2, 3}, std::as_bytes(std::span(a))},
                                           {"b", DType::kBFloat16, {2}, std::as_bytes(std::span(b))},
                                           {"empty", DType::kInt64, {0, 4}, {}}};
  write_safetensors(path, tensors);
  const Safetensors file(path);
  const std::int64_t shape[] = {2, 3}, loose[] = {-1};
  const auto bytes = file.get("a", DType::kFloat32, shape);
  ASSERT_EQ(bytes.size(), 24u);
  EXPECT_EQ(std::memcmp(bytes.data(), a.data(), 24), 0);
  EXPECT_EQ(std::memcmp(file.get("b", DType::kBFloat16, loose).data(), b.data(), 4), 0);
  EXPECT_EQ(text_of([&] { file.get("a", DType::kBFloat16, shape); }), path + ": tensor 'a': expected bfloat16 [2, 3], got float32 [2, 3].");
  EXPECT_EQ(text_of([&] { file.get("a", DType::kFloat32, loose); }), path + ": tensor 'a': expected float32 [any], got float32 [2, 3].");
  EXPECT_EQ(text_of([&] { file.get("c", DType::kFloat32, shape); }),
            path + ": tensor 'c': expected float32 [2, 3], got nothing of that name.");
  std::filesystem::remove(path);
}

TEST(Safetensors, DamageIsNamed) {
  const std::string good =
      R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},"b":{"dtype":"I16","shape":[2],"data_offsets":[8,12]}})";
  EXPECT_EQ(refusal(file_of(good, 12)), "");
  EXPECT_EQ(refusal("1234567"), "f: expected at least 8 bytes of header length, got 7 bytes.");
  EXPECT_EQ(refusal(file_of(good, 11)), "f: tensor 'b': expected data_offsets within 0..11 (is the file truncated?), got [8, 12].");
  EXPECT_EQ(refusal(file_of(good, 13)), "f: expected 12 bytes of data after the header, got 13.");
  EXPECT_EQ(refusal(file_of(good, 0).substr(0, 40)),
            "f: expected a header length of at most 32 (is the file truncated, or not safetensors?), got 108.");
  EXPECT_EQ(refusal(std::string(16, '\xff')),
            "f: expected a header length of at most 8 (is the file truncated, or not safetensors?), got 18446744073709551615.");
  EXPECT_EQ(refusal(file_of("", 4)), "f: expected a JSON object as header.");
  EXPECT_EQ(refusal(file_of("[1]", 0)), "f: expected a JSON object as header.");
  EXPECT_NE(refusal(file_of("{\"a\":", 0)).find("f: expected valid JSON"), std::string::npos);
  const auto tensor = [](const std::string& dtype, const std::string& shape, const std::string& offsets) {
    return file_of("{\"a\":{\"dtype\":" + dtype + ",\"shape\":" + shape + ",\"data_offsets\":" + offsets + "}}", 8);
  };
  EXPECT_EQ(refusal(tensor("\"F32\"", "[2]", "[0,8]")), "");
  EXPECT_EQ(refusal(tensor("\"F33\"", "[2]", "[0,8]")), "f: tensor 'a': expected a known dtype, got 'F33'.");
  EXPECT_EQ(refusal(tensor("3", "[2]", "[0,8]")), "f: tensor 'a': expected dtype, a string.");
  EXPECT_EQ(refusal(tensor("\"F32\"", "2", "[0,8]")), "f: tensor 'a': expected shape, an array of sizes.");
  EXPECT_EQ(refusal(tensor("\"F32\"", "[-2]", "[0,8]")), "f: tensor 'a': expected shape of non-negative integers.");
  EXPECT_EQ(refusal(tensor("\"F32\"", "[2.0]", "[0,8]")), "f: tensor 'a': expected shape of non-negative integers.");
  EXPECT_EQ(refusal(tensor("\"F32\"", "[4294967296,4294967296]", "[0,8]")), "f: tensor 'a': the shape's byte count overflows.");
  EXPECT_EQ(refusal(tensor("\"F32\"", "[18446744073709551615]", "[0,8]")), "f: tensor 'a': the shape's byte count overflows.");
  EXPECT_EQ(refusal(tensor("\"F32\"", "[1,1,1,1,1,1,1,1,2]", "[0,8]")), "f: tensor 'a': expected at most 8 dimensions, got 9.");
  EXPECT_EQ(refusal(tensor("\"F32\"", "[3]", "[0,8]")), "f: tensor 'a': float32 [3] takes 12 bytes, but data_offsets [0, 8] span 8.");
  EXPECT_EQ(refusal(tensor("\"F32\"", "[2]", "[8,0]")),
            "f: tensor 'a': expected data_offsets within 0..8 (is the file truncated?), got [8, 0].");
  EXPECT_EQ(refusal(tensor("\"F32\"", "[2]", "[0]")), "f: tensor 'a': expected data_offsets, two non-negative integers.");
  EXPECT_EQ(refusal(tensor("\"F32\"", "[2]", "[-8,0]")), "f: tensor 'a': expected data_offsets, two non-negative integers.");
  EXPECT_EQ(
      refusal(file_of(R"({"a":{"dtype":"U8","shape":[6],"data_offsets":[0,6]},"b":{"dtype":"U8","shape":[6],"data_offsets":[4,10]}})", 10)),
      "f: tensor 'b': expected data_offsets to begin at 6 (it overlaps the tensor before it), got 4.");
  EXPECT_EQ(
      refusal(file_of(R"({"a":{"dtype":"U8","shape":[6],"data_offsets":[0,6]},"b":{"dtype":"U8","shape":[2],"data_offsets":[8,10]}})", 10)),
      "f: tensor 'b': expected data_offsets to begin at 6 (bytes before it belong to no tensor), got 8.");
  EXPECT_EQ(
      refusal(file_of(R"({"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}})", 1)),
      "f: 'a' is named twice.");
  EXPECT_EQ(refusal(file_of(R"({"__metadata__":{"x":1}})", 0)), "f: expected __metadata__ to be an object of strings.");
  std::string deep = "{\"a\":";
  for (int i = 0; i < 100000; ++i) deep += '[';
  EXPECT_EQ(refusal(file_of(deep, 0)), "f: expected JSON nested at most 16 deep.");
}

TEST(Safetensors, MissingFilesAreNamed) {
  EXPECT_EQ(text_of([] { Safetensors("/nowhere/m.safetensors"); }), "/nowhere/m.safetensors: cannot open: No such file or directory.");
  EXPECT_EQ(text_of([] { Safetensors("/tmp"); }), "/tmp: expected a regular file.");
}

// A flipped, cut or grown file is refused or read; nothing else leaves the parser, and what is read lies inside the file.
RC_GTEST_PROP(Safetensors, MutationsAreReadOrRefused, ()) {
  std::string file = file_of(
      R"({"__metadata__":{"format":"pt"},"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},"b":{"dtype":"BF16","shape":[2,1],"data_offsets":[8,12]}})",
      12);
  const int edits = *rc::gen::inRange(1, 6);
  for (int i = 0; i < edits; ++i) {
    const auto at = *rc::gen::inRange<std::size_t>(0, file.size());
    file[at] = *rc::gen::oneOf(rc::gen::arbitrary<char>(), rc::gen::elementOf(std::string("0123456789[]{},:\"-e.")));
  }
  if (*rc::gen::arbitrary<bool>()) file.resize(*rc::gen::inRange<std::size_t>(0, file.size() + 8));
  try {
    const SafetensorsIndex index = parse_safetensors(std::as_bytes(std::span(file)), "f");
    for (const auto& [name, t] : index.tensors) RC_ASSERT(index.data_begin + t.end <= file.size());
  } catch (const Error&) {
  }
}

const char* kTarget = R"({"architectures":["KimiLinearForCausalLM"],"vocab_size":264,"hidden_size":32,"intermediate_size":48,
  "num_hidden_layers":3,"num_attention_heads":2,"kv_lora_rank":16,"qk_nope_head_dim":8,"qk_rope_head_dim":4,"v_head_dim":8,"mla_use_nope":true,
  "q_lora_rank":null,"rms_norm_eps":1e-5,"hidden_act":"silu","tie_word_embeddings":false,"model_max_length":512,"bos_token_id":256,"eos_token_id":257,
  "linear_attn_config":{"num_heads":1,"head_dim":64,"short_conv_kernel_size":4,"gate_lower_bound":-5.0,"kda_layers":[1],"full_attn_layers":[2,3]},
  "index_n_heads":2,"index_head_dim":8,"index_topk":16,"index_anchor_layers":[1]})";

const char* kDSpark =
    R"({"architectures":["DSparkDraftModel"],"hidden_size":32,"num_hidden_layers":2,"num_attention_heads":2,"num_key_value_heads":1,
  "head_dim":16,"intermediate_size":24,"rms_norm_eps":1e-6,"rope_theta":10000.0,"partial_rotary_factor":0.5,"max_position_embeddings":600,"vocab_size":264,
  "layer_types":["sliding_attention","full_attention"],"sliding_window":64,"is_causal":false,"block_size":3,"num_target_layers":3,
  "dflash_config":{"target_layer_ids":[0,2],"mask_token_id":258},"markov_rank":4,"markov_head_type":"vanilla","confidence_temperatures":[1.0,1,0.5]})";

/// `text` with the first occurrence of `from` replaced.
std::string with(std::string text, const std::string& from, const std::string& to) {
  const auto at = text.find(from);
  EXPECT_NE(at, std::string::npos) << from;
  return text.replace(at, from.size(), to);
}

TEST(Config, TargetIsRead) {
  const TargetConfig c = parse_target_config(kTarget, "c");
  EXPECT_EQ(c.layers, 3);
  EXPECT_EQ(c.is_kda, (std::vector<bool>{true, false, false}));
  EXPECT_EQ(c.anchor_of, (std::vector<int>{-1, 1, 1}));
  EXPECT_EQ(c.top_k, 16);
  EXPECT_FLOAT_EQ(c.gate_lower_bound, -5.0f);
}

TEST(Config, TargetRefusals) {
  const auto refused = [](const std::string& from, const std::string& to) {
    return text_of([&] { parse_target_config(with(kTarget, from, to), "c"); });
  };
  EXPECT_EQ(refused("\"hidden_size\":32", "\"hidden_size\":0"), "c: hidden_size: expected an integer from 1 to 1048576, got 0.");
  EXPECT_EQ(refused("\"hidden_size\":32", "\"hidden_size\":1e3"), "c: hidden_size: expected an integer from 1 to 1048576, got 1000.0.");
  EXPECT_EQ(refused("\"hidden_size\":32", "\"hidden_size\":18446744073709551615"),
            "c: hidden_size: expected an integer from 1 to 1048576, got 18446744073709551615.");
  EXPECT_EQ(refused("\"hidden_size\":32,", ""), "c: hidden_size: expected an integer from 1 to 1048576, got no such field.");
  EXPECT_EQ(refused("\"silu\"", "\"gelu\""), "c: hidden_act: expected \"silu\", got \"gelu\".");
  EXPECT_EQ(refused("\"vocab_size\":264", "\"vocab_size\":200"), "c: bos_token_id: expected an integer from 0 to 199, got 256.");
  EXPECT_EQ(refused("\"head_dim\":64", "\"head_dim\":96"), "c: linear_attn_config: head_dim: expected 64 or 128, got 96.");
  EXPECT_EQ(
      refused("\"kda_layers\":[1]", "\"kda_layers\":[]"),
      "c: linear_attn_config: kda_layers and full_attn_layers: expected every layer in exactly one of the two, got layer 1 in neither.");
  EXPECT_EQ(refused("\"kda_layers\":[1]", "\"kda_layers\":[1,2]"),
            "c: linear_attn_config: kda_layers and full_attn_layers: expected every layer in exactly one of the two, got layer 2 in both, "
            "or twice.");
  EXPECT_EQ(refused("\"full_attn_layers\":[2,3]", "\"full_attn_layers\":[]"),
            "c: linear_attn_config: full_attn_layers: expected at least one layer (the engine runs hybrid models), got none.");
  EXPECT_EQ(refused("\"index_anchor_layers\":[1]", "\"index_anchor_layers\":[0]"),
            "c: index_anchor_layers: expected sparse-MLA layers (0-based), got the KDA layer 0.");
  EXPECT_EQ(refused("\"index_anchor_layers\":[1]", "\"index_anchor_layers\":[2]"),
            "c: index_anchor_layers: expected the first sparse-MLA layer, 1, among them, got [2].");
  EXPECT_EQ(text_of([] { parse_target_config("[]", "c"); }), "c: expected a JSON object, got array.");
  EXPECT_NE(text_of([] { parse_target_config("{", "c"); }).find("c: expected valid JSON"), std::string::npos);
}

TEST(Config, DrafterIsReadAndFits) {
  const DraftConfig d = parse_draft_config(kDSpark, "d");
  EXPECT_EQ(d.kind, DrafterKind::kDSpark);
  EXPECT_EQ(d.proposals(), 3);
  EXPECT_EQ(d.rotary_dim, 8);
  EXPECT_EQ(d.window, (std::vector<int>{64, 0}));
  const TargetConfig t = parse_target_config(kTarget, "c");
  check_drafter_fits(d, t, "d");
  DraftConfig other = d;
  other.hidden = 64;
  EXPECT_EQ(text_of([&] { check_drafter_fits(other, t, "d"); }), "d: hidden_size: expected the target's 32, got 64.");
  other = d;
  other.max_positions = 100;
  EXPECT_EQ(text_of([&] { check_drafter_fits(other, t, "d"); }),
            "d: max_position_embeddings: expected at least the target's model_max_length 512, got 100.");
}

TEST(Config, DrafterRefusals) {
  const auto refused = [](const std::string& from, const std::string& to) {
    return text_of([&] { parse_draft_config(with(kDSpark, from, to), "d"); });
  };
  EXPECT_EQ(refused("DSparkDraftModel", "Eagle"),
            R"(d: architectures: expected ["DFlashDraftModel"] or ["DSparkDraftModel"], got ["Eagle"].)");
  EXPECT_EQ(refused("[1.0,1,0.5]", "[1.0,1]"), "d: confidence_temperatures: expected 3 positive numbers, got [1.0,1].");
  EXPECT_EQ(refused("[1.0,1,0.5]", "[1.0,1,0]"), "d: confidence_temperatures: expected numbers from 1e-6 to 1e6, got 0.");
  EXPECT_EQ(refused("\"partial_rotary_factor\":0.5", "\"partial_rotary_factor\":0.45"),
            "d: partial_rotary_factor: expected an even number of rotary dimensions, at least 2, of head_dim 16, got 7.2.");
  EXPECT_EQ(refused("\"target_layer_ids\":[0,2]", "\"target_layer_ids\":[0,3]"),
            "d: dflash_config: target_layer_ids: expected an array of at most 1024 integers from 0 to 2, got 3.");
  EXPECT_EQ(refused("\"mask_token_id\":258", "\"mask_token_id\":264"),
            "d: dflash_config: mask_token_id: expected an integer from 0 to 263, got 264.");
  EXPECT_EQ(refused("\"sliding_attention\"", "\"chunked\""),
            "d: layer_types: expected sliding_attention or full_attention, got \"chunked\".");
  EXPECT_EQ(refused("\"is_causal\":false", "\"is_causal\":true"), "d: is_causal: expected false, got true.");
  EXPECT_EQ(refused("\"num_key_value_heads\":1", "\"num_key_value_heads\":3"),
            "d: num_key_value_heads: expected a divisor of num_attention_heads 2, got 3.");
}

}  // namespace
