#include "draft_kv/projection.hpp"

#include "core/match.hpp"
#include "core/numeric.hpp"
#include "specstate/supports.hpp"

namespace specstate::draft_kv {

KvProjection::KvProjection(const TensorView& kv_weight, const TensorView& kv_bias) {
  core::Checker check("KvProjection");
  core::Sym L("L"), C("N*D + N*Dv"), hidden("hidden");
  const auto floats = {DType::kFloat32, DType::kBFloat16, DType::kFloat16};
  check.arg("kv_weight", kv_weight).required().dtype(floats).shape({L, C, hidden}).same_device();
  check.require(L >= 1 && kv_weight.device.type == DeviceType::kCpu, "kv_weight", "at least one layer, on the CPU",
                "shape " + shape_text(kv_weight) + " on " + name_of(kv_weight.device));
  check.require(C >= 1 && hidden >= 1, "kv_weight", "at least one row and one feature", "shape " + shape_text(kv_weight));
  check.arg("kv_bias", kv_bias).dtype(floats).shape({L, C}).same_device();
  if (CheckOnly::active()) return;

  auto packed = std::make_shared<Packed>();
  packed->layers = L, packed->columns = C, packed->hidden = hidden, packed->dtype = kv_weight.dtype;
  if (kv_weight.dtype == DType::kFloat16) {  // the product knows no float16; float32 holds it exactly
    packed->weight = specstate::cpu::PackedMatrix(L * C, hidden, DType::kFloat32);
    std::vector<float> row(hidden);
    for (std::int64_t i = 0; i < L * C; ++i) {
      const auto* from = kv_weight.as<core::float16>() + i / C * kv_weight.strides[0] + i % C * kv_weight.strides[1];
      for (std::int64_t h = 0; h < hidden; ++h) row[h] = core::to_float(from[h * kv_weight.strides[2]]);
      packed->weight.set_rows(i, 1, row.data(), hidden);
    }
  } else {
    packed->weight = specstate::cpu::PackedMatrix(L * C, hidden, kv_weight.dtype);
    for (std::int64_t l = 0; l < L; ++l) packed->weight.set_rows(l * C, C, kv_weight[l].data, kv_weight.strides[1], kv_weight.strides[2]);
  }
  if (kv_bias.given()) {
    packed->bias.resize(L * C);
    core::visit_float(kv_bias.dtype, [&](auto* tag) {
      const auto* from = static_cast<decltype(tag)>(kv_bias.data);
      for (std::int64_t i = 0; i < L * C; ++i)
        packed->bias[i] = core::to_float(from[i / C * kv_bias.strides[0] + i % C * kv_bias.strides[1]]);
    });
  }
  packed_ = std::move(packed);
}

DType KvProjection::dtype() const noexcept { return packed_ ? packed_->dtype : DType::kFloat32; }

}  // namespace specstate::draft_kv
