/** Ed25519 identities: raw and text peer ids, and signatures over a domain and the message bytes. */
import { createPublicKey, verify as verifyBytes } from 'node:crypto'
import { generateKeyPair } from '@libp2p/crypto/keys'
import { base58btc } from 'multiformats/bases/base58'

const [PEER_ID_PREFIX, SPKI_PREFIX] = ['002408011220', '302a300506032b6570032100'].map((hex) => Buffer.from(hex, 'hex'))

/** Return the text form of a raw peer id, `12D3KooW...`. */
export const peerIdText = (raw) => base58btc.baseEncode(raw)

/** Return whether the key inside the raw peer id `peer` made this signature. */
export function isSignedBy (peer, domain, data, signature) {
  if (peer.length !== 38 || !PEER_ID_PREFIX.equals(peer.subarray(0, 6))) return false
  const key = createPublicKey({ key: Buffer.concat([SPKI_PREFIX, peer.subarray(6)]), format: 'der', type: 'spki' })
  return verifyBytes(null, Buffer.concat([Buffer.from(domain), data]), key, signature)
}

/** Return a new key: its `privateKey`, its raw and text peer ids, and its `sign(domain, data)`. */
export async function newIdentity () {
  const privateKey = await generateKeyPair('Ed25519')
  const peer = Buffer.concat([PEER_ID_PREFIX, privateKey.publicKey.raw])
  const sign = async (domain, data) => privateKey.sign(Buffer.concat([Buffer.from(domain), data]))
  return { privateKey, peer, text: peerIdText(peer), sign }
}
