// The entry of the quantizers. Everything that belongs to no live element is written as zero.
#include "fp8.h"
#include "mxfp8.h"
#include "nvfp4.h"

extern "C" void blockscale_quantize(const Args* args) {
    DefaultFloats floats;
    const Args& a = *args;
    Tiles tiles(a.offsets, a.groups);
    i64 row_bytes = a.kind == 1 ? 8 * ceil_div(a.columns, 16) : a.columns;
    i64 used = (i64)tiles.tiles.size();
    clear(a.row.data, tiles.live * row_bytes, a.row.data_bytes);
    if (a.kind == 0) clear(a.col.data, tiles.live * a.columns, a.col.data_bytes);
    if (a.kind > 0 && !a.plain) clear(a.col.data, (a.kind == 1 ? 64 : 128) * a.columns * used, a.col.data_bytes);
    clear(a.row.scale, 0, a.row.scale_bytes);
    clear(a.col.scale, 0, a.col.scale_bytes);
    if (a.kind == 0) return a.e5m2 ? mxfp8::quantize<E5M2>(a, tiles) : mxfp8::quantize<E4M3>(a, tiles);
    if (a.kind == 1) return nvfp4::quantize(a, tiles);
    return a.e5m2 ? fp8::quantize<E5M2>(a, tiles) : fp8::quantize<E4M3>(a, tiles);
}
