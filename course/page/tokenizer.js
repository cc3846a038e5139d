// Byte-level BPE, as the workshop model's tokenizer does it (GPT-2's rules; Radford et al. 2019).

"use strict";

// White space by Unicode's own property: JavaScript's \s takes U+FEFF in and leaves U+0085 out.
const WORDS = new RegExp(
  "'s|'t|'re|'ve|'m|'ll|'d| ?\\p{L}+| ?\\p{N}+| ?[^\\p{White_Space}\\p{L}\\p{N}]+" +
    "|\\p{White_Space}+(?!\\P{White_Space})|\\p{White_Space}+", "gu");

/** Every byte has a printable letter that stands for it: itself, or one from U+0100 on. */
function byteLetters() {
  const letters = [];
  for (let byte = 0, extra = 256; byte < 256; byte++) {
    const printable = (byte > 32 && byte < 127) || (byte > 160 && byte !== 173);
    letters.push(String.fromCharCode(printable ? byte : extra++));
  }
  return letters;
}

class Tokenizer {
  /** words: every token by its number, in byte letters; merges: pairs "a b", the first to be joined first;
   * special: {text: number} of tokens that are never split. */
  constructor({ words, merges, special }) {
    this.words = words;
    this.numbers = new Map(words.map((word, number) => [word, number]));
    this.ranks = new Map(merges.map((pair, rank) => [pair, rank]));
    this.special = special;
    this.letters = byteLetters();
    this.bytes = new Map(this.letters.map((letter, byte) => [letter, byte]));
    this.apart = new RegExp(`(${Object.keys(special).map((s) => s.replace(/[|]/g, "\\|")).join("|")})`);
  }

  /** Text to token numbers. */
  encode(text) {
    const ids = [];
    for (const part of text.split(this.apart)) {
      if (part in this.special) ids.push(this.special[part]);
      else for (const [word] of part.matchAll(WORDS)) ids.push(...this.merged(word));
    }
    return ids;
  }

  /** One word's tokens: its bytes, the pair of lowest rank joined again and again. */
  merged(word) {
    let parts = Array.from(new TextEncoder().encode(word), (byte) => this.letters[byte]);
    for (;;) {
      let best = Infinity, pair = null;
      for (let i = 0; i + 1 < parts.length; i++) {
        const rank = this.ranks.get(`${parts[i]} ${parts[i + 1]}`);
        if (rank < best) [best, pair] = [rank, [parts[i], parts[i + 1]]];
      }
      if (pair === null) return parts.map((part) => this.numbers.get(part));
      const joined = [];
      for (let i = 0; i < parts.length; i++) {
        const here = parts[i] === pair[0] && parts[i + 1] === pair[1];
        joined.push(here ? parts[i] + parts[++i] : parts[i]);
      }
      parts = joined;
    }
  }

  /** Token numbers to text; bytes that make no letter become U+FFFD. */
  decode(ids) {
    const bytes = [];
    for (const id of ids) {
      if (this.words[id] in this.special) bytes.push(...new TextEncoder().encode(this.words[id]));
      else for (const letter of this.words[id]) bytes.push(this.bytes.get(letter));
    }
    return new TextDecoder().decode(new Uint8Array(bytes));
  }
}
