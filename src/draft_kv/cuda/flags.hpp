#pragma once
// What a kernel could not refuse in time. A GPU has two words of pinned host memory: a kernel that meets a row which it cannot write sets one of
// them, and the host reads them without waiting for anybody.
namespace specstate::draft_kv::cuda {

/// A slot beyond the pool, a position outside the table.
inline constexpr int kSlotFlag = 0, kPositionFlag = 1, kFlags = 2;

/// The words of the current GPU as its kernels see them, made at the first call (also while a graph is being captured).
int* device_flags();

}  // namespace specstate::draft_kv::cuda
