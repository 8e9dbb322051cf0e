/** The task `arithmetic`: which problem an index is, and its reward. */
import { blake2b } from '@noble/hashes/blake2.js'

const [NUM_HELD_OUT, KINDS] = [256, ['+', '-']]
const OPERANDS = Array.from({ length: 90 }, (_, index) => index + 10)

const hash = (text) => Buffer.from(blake2b(Buffer.from(text), { dkLen: 8 })).readBigUInt64LE()
const answerOf = ({ kind, left, right }) => (kind === '+' ? left + right : left - right)
const textOf = ({ kind, left, right }) => `${left}${kind}${right}=`
const isAsked = (problem) => answerOf(problem) >= 10 && answerOf(problem) <= 99
/** Return the problem with its larger operand first. */
const canonical = ({ kind, left, right }) => ({ kind, left: Math.max(left, right), right: Math.min(left, right) })

function heldOutTexts (kind) {
  const pairs = OPERANDS.flatMap((left) => OPERANDS.filter((right) => right <= left).map((right) => ({ kind, left, right })))
  const texts = pairs.filter(isAsked).map(textOf)
  return texts.sort((a, b) => (hash(a) < hash(b) ? -1 : 1)).slice(0, NUM_HELD_OUT)
}
const HELD_OUT = new Set(KINDS.flatMap(heldOutTexts))

/** Return the text and the answer of problem `index` of the training split. */
export function problemAt (index) {
  const kind = KINDS[Number(hash(`train/${index}`) % 2n)]
  for (let attempt = 0; ; attempt++) {
    const bits = hash(`train/${index}/${attempt}`)
    const drawn = { kind, left: 10 + Number(bits % 90n), right: 10 + Number((bits / 90n) % 90n) }
    const problem = kind === '-' ? canonical(drawn) : drawn
    if (isAsked(problem) && !HELD_OUT.has(textOf(canonical(problem)))) {
      return { text: textOf(problem), answer: String(answerOf(problem)) }
    }
  }
}

/** Return the reward of a completion without its special tokens. */
export const score = (problem, text) => (text.trim() === problem.answer ? 1 : 0)
