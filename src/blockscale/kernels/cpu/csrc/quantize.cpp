// The entry of the quantizers. Everything that belongs to no live element is written as zero.
#include "fp8.h"
#include "mxfp4.h"
#include "mxfp8.h"
#include "nvfp4.h"

extern "C" void blockscale_quantize(const Args* args) {
    DefaultFloats floats;
    const Args& a = *args;
    Tiles tiles(a.offsets, a.groups);
    bool packed = a.kind == 1 || a.kind == 4;
    i64 block = a.kind == 1 ? 16 : 32, row_bytes = packed ? block / 2 * ceil_div(a.columns, block) : a.columns;
    i64 used = (i64)tiles.tiles.size();
    clear(a.row.data, tiles.live * row_bytes, a.row.data_bytes);
    if (a.kind == 0) clear(a.col.data, tiles.live * a.columns, a.col.data_bytes);
    if (a.kind > 0 && !a.plain) clear(a.col.data, (packed ? 64 : 128) * a.columns * used, a.col.data_bytes);
    clear(a.row.scale, 0, a.row.scale_bytes);
    clear(a.col.scale, 0, a.col.scale_bytes);
    if (a.kind == 0) return a.e5m2 ? mxfp8::quantize<E5M2>(a, tiles) : mxfp8::quantize<E4M3>(a, tiles);
    if (a.kind == 1) return nvfp4::quantize(a, tiles);
    if (a.kind == 4) return mxfp4::quantize(a, tiles);
    return a.e5m2 ? fp8::quantize<E5M2>(a, tiles) : fp8::quantize<E4M3>(a, tiles);
}
