/** A tokenizer of a model folder, its fingerprint, and the prompts of the tiny models' chat template. */
import { readFileSync } from 'node:fs'
import { join } from 'node:path'
import { Tokenizer } from '@huggingface/tokenizers'
import { asciiJson, FINISH_STOP, shortHash } from './rollout.js'

const PROBES = [ // as the page has them
  'The quick brown fox doesn\'t jump; it\'s 12345 + 67890 = 80235.',
  '  two spaces,\ttab\n\n\nlines \r\n end ',
  'na\u00efve caf\u00e9 cafe\u0301 \u00dcn\u00efc\u00f6d\u00e9 \ufb01 \u00bd \u6771\u4eac \u0440\u043e\u0441\u0441\u0438\u044f ' +
    '\ud83d\ude42\ud83d\udc69\u200d\ud83d\udc69\u200d\ud83d\udc67',
  'def f(x):\n    return {\'a\': x**2, "b": [1.5e-3]}  # <think> </answer>'
]

export class ModelTokenizer {
  constructor (folder) {
    const [file, config] = ['tokenizer.json', 'tokenizer_config.json'].map((name) => JSON.parse(readFileSync(join(folder, name))))
    Object.assign(this, { _tokenizer: new Tokenizer(file, config), _file: file, _config: config })
    this._special = new Set(file.added_tokens.filter((token) => token.special).map(({ id }) => id))
    this.endId = this._specialId(config.eos_token)
    this.fingerprint = shortHash(asciiJson(this._identity()))
  }

  encode = (text) => this._tokenizer.encode(text, { add_special_tokens: false }).ids

  /** Return the text of a completion without the token that ended it; null if it has another special token. */
  answerText (tokenIds, finish) {
    const ids = Array.from(finish === FINISH_STOP ? tokenIds.slice(0, -1) : tokenIds)
    return ids.some((id) => this._special.has(id)) ? null : this._tokenizer.decode(ids)
  }

  /** Return the ids of a user's message with the generation prompt, by the tiny models' template. */
  encodePrompt = (content) => this.encode(`<|im_start|>user\n${content}<|im_end|>\n<|im_start|>assistant\n`)

  _specialId = (content) => this._file.added_tokens.find((token) => token.content === content)?.id ?? null

  /** Return what the fingerprint hashes; keys are in order. */
  _identity () {
    const { vocab, merges } = this._file.model
    const added = this._file.added_tokens.map(({ content, id }) => [content, id])
    const tokens = new Map([...Object.entries(vocab), ...added])
    return {
      merges: (merges ?? []).map((merge) => (typeof merge === 'string' ? merge.split(' ') : merge)),
      probes: PROBES.map((text) => this.encode(text)),
      special: this._file.added_tokens.filter((token) => token.special).map(({ id, content }) => [id, content]).sort(([a], [b]) => a - b),
      vocabulary: [...tokens].sort(([a], [b]) => Buffer.compare(Buffer.from(a), Buffer.from(b)))
    }
  }
}
