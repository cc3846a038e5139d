// Formats: how a token's K or V is written down. As kvlab/store/int.py, number for number.

"use strict";

const EXACT = { bytes: (width) => 4 * width, write: (x) => x };

/** Symmetric integers, one fp16 scale per vector: x ~ code * scale, scale = absmax / qmax rounded up. */
function integers(bits) {
  const qmax = 2 ** (bits - 1) - 1;
  return {
    bytes: (width) => (width * bits) / 8 + 2,
    /** x, one token's vector in one head, becomes what its codes say, in place. */
    write(x) {
      let most = 0;
      for (const value of x) most = Math.max(most, Math.abs(value));
      const scale = halfAbove(Math.fround(most / qmax)), step = Math.max(scale, 2 ** -24);
      for (let i = 0; i < x.length; i++) x[i] = halfEven(Math.fround(x[i] / step)) * scale;
      return x;
    },
  };
}

/** The smallest fp16 number that is not below x >= 0: eleven digits, none smaller than 2^-24. */
function halfAbove(x) {
  if (x === 0) return 0;
  const exponent = Math.max(-14, (new Uint32Array(Float32Array.of(x).buffer)[0] >>> 23) - 127);
  const step = 2 ** (exponent - 10);
  return Math.ceil(x / step) * step;
}

/** The nearest whole number, the even one of two (Math.round takes the upper one). */
function halfEven(x) {
  const near = Math.round(x);
  return near - x === 0.5 && near % 2 !== 0 ? near - 1 : near;
}
