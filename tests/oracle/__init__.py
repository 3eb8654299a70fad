"""An independent oracle of what blockscale must produce, bit for bit, in numpy and ml_dtypes alone.

It is written from the two specification pages (numerics and layouts) and imports nothing of the package under test,
so that an error in one of them shows as a difference. One file per topic:

codes        elements (E4M3, E5M2, E2M1) and scales (E8M0, E4M3)
blocks       cutting a matrix into blocks, maxima that leave NaN out, the Plane record
philox       Philox4x32-10 and the 16 random bits of each element
mxfp8, mxfp4, nvfp4, fp8   the formats: quantize and dequantize, plain tensors
four_six     NVFP4's choice between 4 and 6, block by block
layouts      compact, swizzled, 8x4 and linear scale buffers of a plain tensor
grouped      whole buffers of a grouped tensor, byte address by byte address
activations  forward values and gradients of the activations
formats      one entry for all formats, by name and options
inputs, check   test inputs that hurt; comparing by bits
"""
