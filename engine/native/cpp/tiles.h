// The tiles of AMX: whether a process may use them, and their shape. A thread configures and releases them around each
// use, because other libraries in the process configure other shapes.
#pragma once
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstdint>

namespace latebranch {

// Request the tiles' state from Linux, once.
inline bool has_tiles() {
  static const bool has = [] {
    constexpr long kRequestPermission = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
    uint32_t a, b, c, d;
    asm volatile("cpuid" : "=a"(a), "=b"(b), "=c"(c), "=d"(d) : "a"(7), "c"(0));
    const bool is_there = (d >> 24 & 1) && (d >> 25 & 1);  // AMX-TILE, AMX-INT8
    return is_there && syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
  }();
  return has;
}

// Eight tiles of 16 rows of 64 bytes.
inline void begin_tiles() {
  alignas(64) static const struct Shape {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
    uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
  } shape;
  _tile_loadconfig(&shape);
}

}  // namespace latebranch
