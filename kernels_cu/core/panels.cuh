// Tiles as TMA writes and wgmma reads them, and the barriers that pass them on.
//
// A tile is cut into panels of 64 columns; a row of a panel is 128 bytes, eight chunks of 16, and chunk c of row r lies
// at place c ^ (r % 8) (TMA's and wgmma's 128-byte swizzle).
#pragma once
#include "core/block.cuh"
#include "core/ptx_sm90.cuh"

CF_DEVICE u32 barrier(const u64* bars, u32 stage) { return shared_address(bars) + 8 * stage; }

// Lower half of a wgmma operand's descriptor. stride: of 64-column panels, where columns are not what is summed over.
CF_DEVICE u32 descriptor(u32 tile, u32 stride) { return (tile & 0x3ffffu) >> 4 | (stride >> 4) << 16; }
// The upper half is the same for all: 8 rows are 1024 bytes, swizzled by 128.
CF_DEVICE u64 whole(u32 lower) { return u64(1024 >> 4 | 1u << 30) << 32 | lower; }
