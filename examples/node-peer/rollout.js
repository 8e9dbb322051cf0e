/** Groups on the wire: envelopes, the codecs `exact`, `lossless` and `lossy`, and announcements. */
import { createHash } from 'node:crypto'
import { fileURLToPath } from 'node:url'
import { Decompress } from 'fzstd'
import protobuf from 'protobufjs'
import { isSignedBy, peerIdText } from './identity.js'

const root = protobuf.loadSync(fileURLToPath(new URL('../../proto/rollout.proto', import.meta.url)))
const [Envelope, Body, Announcement] = ['Envelope', 'Body', 'Announcement'].map((name) => root.lookupType(`ftis.v1.${name}`))

export const [CODEC, FINISH_STOP] = [{ exact: 1, lossless: 3, lossy: 4 }, 1]
const [ENVELOPE_DOMAIN, MAX_GROUP_TOKENS] = ['ftis-node/envelope/1\n', 524288]
const LOGPROB_PLANES = { [CODEC.lossless]: 4, [CODEC.lossy]: 3 }

/** A message of a peer that breaks a rule. `reason` is a name of docs/reference/refusals.md. */
export class Rejected extends Error {
  constructor (reason, detail) {
    super(`${reason}: ${detail}`)
    this.reason = reason
  }
}

export const sha256 = (data) => createHash('sha256').update(data).digest()
/** Return the first 16 bytes of a SHA-256: run ids, problem hashes, fingerprints of tokenizers. */
export const shortHash = (data) => sha256(data).subarray(0, 16)
/** Return the hash of a problem that is one user's message. */
export const problemHash = (content) => shortHash(asciiJson([{ content, role: 'user' }]))
export const promptHash = (ids) => sha256(int32Bytes(ids)).subarray(0, 4)
/** Return JSON without spaces, with `\u` escapes for all that is not ASCII. */
export const asciiJson = (value) =>
  JSON.stringify(value).replace(/[\u007f-\uffff]/g, (unit) => `\\u${unit.charCodeAt(0).toString(16).padStart(4, '0')}`)
export const int32Bytes = (values) => Buffer.from(Int32Array.from(values).buffer)
export const float32Bytes = (values) => Buffer.from(Float32Array.from(values).buffer)

const write = (type, fields) => Buffer.from(type.encode(type.fromObject(fields)).finish())
export const writeAnnouncement = (fields) => write(Announcement, { schema: 1, ...fields })
export const readAnnouncement = (data) => read(Announcement, data)

/** Sign a body. Return the id of its group and the envelope. */
export async function sealBody (fields, identity) {
  const body = write(Body, { schema: 1, ...fields })
  const signature = await identity.sign(ENVELOPE_DOMAIN, body)
  return { id: sha256(body), envelope: write(Envelope, { body, signature }) }
}

/** Return the id, the fields and the completions (`tokenIds`, `logprobs`, `reward`) of a signed group, or throw Rejected. */
export function openEnvelope (data, run) {
  const { body, signature } = read(Envelope, data)
  const fields = read(Body, body)
  if (fields.schema !== 1) throw new Rejected('version', `schema ${fields.schema}`)
  checkFields(fields)
  if (!run.equals(fields.run)) throw new Rejected('run', 'another run')
  if (!isSignedBy(fields.sender, ENVELOPE_DOMAIN, body, signature)) throw new Rejected('signature', 'not the sender\'s')
  if (fields.turns.length) throw new Rejected('episode_mismatch', 'this run has completions of one turn')
  return { id: sha256(body), sender: peerIdText(fields.sender), fields, completions: readCompletions(fields) }
}

function read (type, data) {
  try {
    return type.toObject(type.decode(data), { longs: Number, arrays: true, defaults: true })
  } catch (error) {
    throw new Rejected('parse', error.message)
  }
}

/** Check the bounds of all fields, used here or not: this peer must not confirm what others refuse. */
function checkFields ({ codec, ...fields }) {
  if (codec !== CODEC.exact && !(codec in LOGPROB_PLANES)) throw new Rejected('codec', `codec ${codec}`)
  const { run, number, weightsOf, lengths, finishes, rewards, versionOffsets: offsets, versionSpans: spans } = fields
  const others = codec === CODEC.exact ? ['idPlanes', 'logprobPlanes'] : ['tokenIds', 'logprobs']
  const isMixed = ['texts', 'meanLogprobs', 'exact_group', ...others].some((name) => fields[name].length)
  const { problemHash: problem, promptHash: prompt, endIds, opening } = fields
  const isBound = run.length === 16 && number >= 1 && number < 2 ** 63 && [0, 38].includes(weightsOf.length) &&
    problem.length === 16 && prompt.length === 4 && endIds.length <= 64 && Buffer.byteLength(opening) <= 64
  const areAligned = [finishes, rewards, ...(offsets.length || spans.length ? [offsets, spans] : [])].every((one) => one.length === lengths.length)
  const isWrong = isMixed || !isBound || !areAligned || !areTurns(fields) || lengths.includes(0) || (offsets.length && !offsets.includes(0))
  if (isWrong) throw new Rejected('malformed', 'a field is out of bounds')
}

/** Return whether the turns of an episode fit the lengths: those of a completion sum to its length. */
function areTurns ({ turns, turnLengths, observationHash, lengths }) {
  const numTurns = turns.reduce((sum, count) => sum + count, 0)
  if (observationHash.length !== (turns.length ? 16 : 0) || turnLengths.length !== numTurns) return false
  if (turns.length !== 0 && turns.length !== lengths.length) return false
  let end = 0
  return turnLengths.every((length) => length > 0) && turns.every((count, index) => {
    const start = end
    end += count
    return count >= 1 && count <= 256 && turnLengths.slice(start, end).reduce((sum, length) => sum + length, 0) === lengths[index]
  })
}

function readCompletions (fields) {
  const { lengths, rewards } = fields
  const numTokens = lengths.reduce((sum, length) => sum + length, 0)
  if (numTokens < 1 || numTokens > MAX_GROUP_TOKENS) throw new Rejected('malformed', 'lengths')
  const { tokenIds, logprobs } = readTokens(fields, numTokens)
  let end = 0
  return lengths.map((length, index) => {
    const start = end
    end += length
    return { tokenIds: tokenIds.slice(start, end), logprobs: logprobs.slice(start, end), reward: rewards[index] }
  })
}

function readTokens (fields, numTokens) {
  const { codec, tokenIds, logprobs, idPlanes, logprobPlanes } = fields
  if (codec === CODEC.exact) {
    if (tokenIds.length !== 4 * numTokens || logprobs.length !== 4 * numTokens) throw new Rejected('malformed', 'arrays')
    return { tokenIds: new Int32Array(Uint8Array.from(tokenIds).buffer), logprobs: new Float32Array(Uint8Array.from(logprobs).buffer) }
  }
  if (![1, 2, 3, 4].includes(idPlanes.length) || logprobPlanes.length !== LOGPROB_PLANES[codec]) throw new Rejected('malformed', 'planes')
  const ids = idPlanes.map((plane) => readPlane(plane, numTokens))
  const values = logprobPlanes.map((plane) => readPlane(plane, numTokens))
  return { tokenIds: joinPlanes(ids), logprobs: codec === CODEC.lossy ? lossy(values) : new Float32Array(joinPlanes(values).buffer) }
}

function readPlane (frame, numTokens) {
  let plane = Buffer.alloc(0)
  const stream = new Decompress((chunk) => {
    plane = Buffer.concat([plane, chunk])
    if (plane.length > numTokens) throw new Rejected('malformed', 'a plane is too long')
  })
  stream.push(frame, true)
  if (plane.length < numTokens) throw new Rejected('malformed', 'a plane is too short')
  return plane
}

/** Return the numbers whose bytes, the lowest first, are in these planes. */
const joinPlanes = (planes) => Uint32Array.from(planes[0], (_, index) =>
  planes.reduce((value, plane, place) => value + plane[index] * 2 ** (8 * place), 0))

function lossy ([low, middle, high]) {
  if (low.some((byte) => byte > 31) || high.some((byte) => byte > 7)) throw new Rejected('malformed', 'lossy planes')
  return Float32Array.from(low, (byte, index) => -(byte | (middle[index] << 5) | (high[index] << 13)) / 256)
}
